"""Built-in rewards: their options, what they pay, how each is cheated, and which option ends that."""

import re
import shlex
import time
from pathlib import Path

import pytest

from oblrpo.errors import InputError
from oblrpo.objects import split_objects
from oblrpo.rewards import Rewards, of_rows, split_weight
from oblrpo.rewards.built_in import BUILT_IN
from oblrpo.tasks import DataTask, Problem
from tests.rewards.conftest import RewardSet
from tests.tasks.conftest import HOSTILE


def pay(name, text, answer="", others=(), ids=None, **columns):
    """What a completion earns on the first row of data whose other rows have other answers."""
    rows = [Problem("p", answer, columns), *(Problem(f"p {n}", other) for n, other in enumerate(others))]
    rewards = Rewards(DataTask("d", rows, []), [name])
    try:
        return rewards(rows[:1], [text], None if ids is None else lambda: [ids])[0][0][0]
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("name", "text", "answer", "earned"),
    [
        ("contains", "It is Paris.", "Paris", 1),
        ("contains", "It is paris.", "Paris", 0),
        ("contains:{ignore_case: true}", "It is PARIS.", "Paris", 1),
        ("contains", "in New\n  York", "New York", 1),
        ("contains", "首都是東京です", "東京", 1),
        ("contains", "กรุงเทพเป็น", "กรุงเทพ", 1),
        ("contains", "C++ is one", "C++", 1),
        ("contains", "it costs 3.5", "5", 0),
        ("contains", "it costs 5.", "5", 1),
        ("contains:yes", "yes, no", "no", 1),
        ("contains:yes@-2", "yes", "", -2),
        ("contains:{text: [because, so]}", "so", "", 0.5),
        ("contains:{text: [because, so], any: true}", "so", "", 1),
        ("exact:{ignore_case: true, ignore_punctuation: true}", " paris. ", "Paris", 1),
        (r"regex:^\d+$", "12", "", 1),
        (r"regex:^\d+$", "12 a", "", 0),
        (r"regex:\S+@\S+", "to a@b.c", "", 1),
        (r"regex:\S+@\d@0.5", "to a@5", "", 0.5),
        (r"regex:{pattern: 'Answer: (\w+)', answer: true}", "Answer: B.", "B", 1),
        (r"regex:{pattern: '(\w)?.*', answer: true}", "?", "B", 0),
        ("json_valid", ' [{"a": 1}]\n', "", 1),
        ("json_valid", '{"a": 1} and', "", 0),
        ("json_valid", '{"a": NaN}', "", 0),
        ("json_valid", '```json\n{"a": 1}\n```', "", 0),
        ("json_valid:{fenced: true}", '```json\n{"a": 1}\n```', "", 1),
        ("json_valid:{fenced: true}", '{"a": 1}', "", 1),
        ("json_valid:{keys: [a, b]}", '{"a": 1, "b": null}', "", 1),
        ("json_valid:a", '[{"a": 1}]', "", 0),
        ("length", "a b  c", "", 3),
        ("length:characters", "a b  c", "", 6),
        ("length:{unit: words, least: 2, most: 3}", "a b c", "", 0),
        ("length:{unit: words, least: 2, most: 3}", "a b c d", "", -1),
        ("length:{unit: words, least: 2, most: 3}", "a", "", -1),
        ("length:{least: 10, most: 30, soft: 5}", "a " * 12, "", -0.6),
        ("length:{least: 10, most: 30, soft: 5}", "a " * 20, "", 0),
    ],
)
def test_what_they_pay(name, text, answer, earned):
    assert pay(name, text, answer) == pytest.approx(earned)


@pytest.mark.parametrize(
    ("open_", "closed", "cheat", "honest", "answer"),
    [
        # Words
        ("contains:{others: any}", "contains", "yes no", "no, yes", "yes"),
        ("contains:{others: any}", "contains:{others: none}", "no yes", "so yes", "yes"),
        ("contains:{parts: true, others: any}", "contains", "nothing", "so no", "no"),
        ("contains:{others: any}", "contains", "the maybe not", "maybe", "maybe"),
        # A pattern that is found anywhere
        ("regex:[ABC]", "regex:^[ABC]$", "ABCABC", "B", "B"),
        ("regex:[ABC]", "regex:{pattern: '[ABC]', whole: true}", "ABCABC", "B", "B"),
        (
            "regex:Answer. B",
            "regex:{pattern: 'Answer. ([ABC])', answer: true}",
            "Answer: B Answer: C",
            "Answer: B",
            "B",
        ),
        ("regex:<think>.*</think>", "regex:<think>.{9,}</think>", "<think></think>", "<think>7 and 3 is</think>", ""),
        ("contains", r"regex:{pattern: 'Answer: (\w+)', answer: true}", "Not Paris.", "Answer: Paris", "Paris"),
        # JSON that says nothing
        ("json_valid", "json_valid:name", "{}", '{"name": "x"}', ""),
        ("json_valid:name", "json_valid:{keys: [name], filled: true}", '{"name": ""}', '{"name": "x"}', ""),
        # Padding, and words that hide in one
        ("length:{least: 3}", "length:{least: 3, distinct: true}", "very very very", "it is so", ""),
        ("length:{most: 3}", "length:{unit: characters, most: 20}", "so,this_is_one_long_word", "it is so", ""),
        ("length:{unit: characters, least: 9}", "length:{least: 3}", " " * 12, "there it is", ""),
        # The last number alone; a question that is handed back as the answer
        ("numeric", "math", "7/4", "3/4", "3/4"),
        ("math", "numeric", r"\boxed{17 \times 23}", "391", "391"),
        ("exact:{ignore_case: true}", "exact", "paris", "Paris", "Paris"),
    ],
)
def test_a_cheat_pays_until_an_option_ends_it(open_, closed, cheat, honest, answer):
    others = ["no", "yes", "not", "maybe"]
    paid = [pay(name, text, answer, others) for name in (open_, closed) for text in (honest, cheat)]
    assert paid[0] == paid[1] == paid[2] > paid[3]


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("numeric", "5", "5"),
        ("numeric", "it may be 1, 2, no: 5", "5"),
        ("exact", "yes", "yes"),
        ("json_valid", "[]", ""),
    ],
)
def test_what_no_option_ends(name, text, answer):
    """The commonest answer, said to every prompt, and what is said before a number."""
    assert pay(name, text, answer, ["no"]) == 1


def test_an_answer_inside_a_longer_one_is_not_said():
    cities = ["York", "New York"]
    assert [pay("contains", f"In {said}.", gold, cities) for said in cities for gold in cities] == [1, 0, 0, 1]


def test_other_answers_are_found_fast_among_many():
    rows = [Problem(f"p {n}", f"name {n} of {n % 7}") for n in range(50_000)]
    rewards = Rewards(DataTask("d", rows, []), ["contains"])
    text = "I say " + "that it may be " * 100
    rewards(rows[:1], [text])
    started = time.process_time()
    assert rewards(rows[:1], [f"{text} name 0 of 0", f"name 0 of 0 {text} name 8 of 1"]) == ([[1.0, 0.0]], [[True] * 2])
    assert time.process_time() - started < 1


def test_rows_may_bring_what_is_asked_of_them():
    assert pay("contains:{column: aliases, any: true}", "by Twain", aliases=["Twain", "Clemens"]) == 1
    assert pay("contains:{column: aliases}", "by Twain", aliases=["Twain", "Clemens"]) == 0.5
    assert pay("contains:{column: extra.word}", "so", extra={"word": "so"}) == 1
    assert pay("regex:{column: form}", "12", form=r"^\d+$") == 1
    assert pay("json_valid:{column: fields}", '{"a": 1}', fields=["a", "b"]) == 0
    # The data's own column, although the answer is another's.
    rows = [Problem("p", "one", {"answer": "two"})]
    for name, earned in (("contains:{column: answer}", 1), ("contains", 0)):
        assert Rewards(DataTask("d", rows, []), [name])(rows, ["two"])[0] == [[earned]]
    with pytest.raises(InputError, match="reads the column 'nothing', which the problems do not have"):
        pay("contains:{column: nothing}", "a")


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("numeric", {"answer": "Paris"}, "'answer' holds no number .* choose --rewards contains .* reward='contains'"),
        ("contains:{column: a}", {"a": []}, "column 'a' holds no text that the reward 'contains' could look for"),
        ("contains:{column: a}", {}, "column 'a' holds no text"),
        ("regex:{column: a}", {"a": "("}, r"holds no pattern for the reward 'regex': '\(' is no regular expression"),
        ("regex:{column: a, answer: true}", {"a": "b"}, "has no group"),
        ("regex:{column: a}", {"a": 5}, "is no text"),
        ("json_valid:{column: a}", {"a": " "}, "holds no key"),
    ],
)
def test_rows_that_cannot_be_graded(name, row, words):
    compared, [fault] = of_rows([f"{name}@2", "mine.py:f"])
    assert compared == (name == "numeric" or "answer" in name)
    assert re.search(words, fault(row, row.get("answer", ""), "answer"))
    assert not fault({"a": r"(\d)" if "regex" in name else "x"}, "5", "answer")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("regex", "reward 'regex': give the pattern of all rows"),
        ("regex:", "reward 'regex:' lacks a value; write regex:VALUE, or 'regex:{OPTION: VALUE}' with pattern, column"),
        ("regex:(a", r"'(a' is no regular expression: missing )"),
        ("regex:" + "(" * 9_999, "is no regular expression"),
        ("regex:{pattern: a, answer: true}", "'a' has no group"),
        ("regex:{.*}", "has no '.*'; there are: pattern, column, whole, answer"),
        ("regex:{pattern: a", "is not valid YAML"),
        ("contains:{text: a, column: b}", "give one of them"),
        ("contains:{others: after}", "others is 'after'; choose one of: before, none, any"),
        ("contains: ", "the text to look for is blank"),
        ("contains:{task: a}", "has no 'task'"),
        ("json_valid:{keys: a, column: b}", "give one of them"),
        ("json_valid:{filled: true}", "filled is for keys"),
        ("length:bytes", "unit is 'bytes'; choose one of: words, characters, tokens"),
        ("length:{leest: 3}", "Did you mean 'least'?"),
        ("length:{least: -1}", "reward 'length:{least: -1}': least is -1; it must be"),
        ("length:{least: 3, most: 2}", "least, 3, is above most, 2."),
        ("length:{soft: 3}", "give least or most"),
        ("numeric:5", "reward 'numeric:5' has no options; write numeric."),
        ("contain:yes", "Did you mean 'contains'?"),
    ],
)
def test_bad_options_are_one_sentence(name, words):
    with pytest.raises(InputError) as caught:
        RewardSet([name])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("contains:a@b", ("contains:a@b", 1)),
        ("contains:a@2", ("contains:a", 2)),
        (r"regex:\S+@\S+@-1", (r"regex:\S+@\S+", -1)),
        ("length:{most: 3}@.5", ("length:{most: 3}", 0.5)),
    ],
)
def test_a_weight_behind_options(text, parts):
    assert split_weight(text) == parts
    with pytest.raises(InputError, match="the weight after @ is 'b'"):
        split_weight("mine.py:a@b")


def test_weights_from_python_beside_options():
    settings, _ = split_objects(rewards=["regex:a@b", len, "contains:so"], reward_weights=[1, 2, 0.5])
    assert settings["rewards"] == ("regex:a@b", "python:len@2", "contains:so@0.5")


def test_names_of_metrics_have_no_options_unless_two_are_alike(tmp_path):
    (tmp_path / "mine.py").write_text("def length(completions, **_):\n    return [0.0] * len(completions)\n")
    names = ["contains:so", r"regex:\.$", "regex:x.y", "json_valid:{keys: [a.b]}", f"{tmp_path}/mine.py:length"]
    rewards = RewardSet(names)
    rewards(["p"], ["so."])
    rewards.close()
    assert list(rewards.take_earned()) == ["contains", r"regex:\.$", "regex:x.y", "json_valid", "length"]


def test_tokens_are_those_the_model_wrote():
    name = "length:{unit: tokens, most: 6, soft: 4}"
    assert RewardSet([name]).needs_ids
    assert not RewardSet(["length:{most: 6}"]).needs_ids
    assert [pay(name, "x", ids=[9] * size) for size in (2, 3, 6, 7)] == [0, -0.25, -1, -1]
    assert pay("length:{unit: tokens, distinct: true}", "x", ids=[9] * 5) == 1
    with pytest.raises(InputError, match="counts tokens, but those of these completions are not known"):
        pay(name, "x")


@pytest.mark.parametrize("soft", [0, 1, 3])
def test_a_limit_is_the_soft_overlong_punishment_of_trl(soft):
    """`trl.rewards.get_soft_overlong_punishment`, of TRL 1.16, written again."""
    most = 8

    def of_trl(size):
        if size <= most - soft:
            return 0.0
        return (most - soft - size) / soft if size <= most else -1.0

    name = f"length:{{unit: tokens, most: {most}, soft: {soft}}}"
    assert [pay(name, "x", ids=[0] * size) for size in range(12)] == [of_trl(size) for size in range(12)]


def test_a_pattern_that_backtracks_for_years_has_not_matched(capfd):
    rewards = RewardSet(["regex:(a+)+$"])
    started = time.monotonic()
    assert rewards(["p"] * 3, ["a" * 40 + "b", "aaa", "a" * 50 + "b"]) == [0.0, 1.0, 0.0]
    assert time.monotonic() - started < 60
    rewards.close()
    assert capfd.readouterr().err.count("was matched for over a second on a completion, which counts as no match") == 1


def test_a_batch_of_such_texts_ends_in_one_sentence_and_the_next_is_answered():
    rewards = RewardSet(["regex:(a+)+$"], seconds=0.5)
    with pytest.raises(InputError, match=r"^reward 'regex:\(a\+\)\+\$' took longer than 0.5 s \(reward_seconds\)"):
        rewards(["p"], ["a" * 40 + "b"])
    rewards.close()
    rewards = RewardSet(["regex:(a+)+$"], "mask", seconds=60)
    assert rewards(["p"], ["aaa"]) == [1.0]
    rewards.close()


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_hostile_completions_earn_something_fast(hostile):
    names = ["contains", "contains:{parts: true, ignore_case: true}", "json_valid:{keys: [a], fenced: true}"]
    names += ["json_valid", "length", "length:characters", "regex:^a$", "exact:{ignore_punctuation: true}"]
    started = time.process_time()
    for name in names:
        assert 0 <= pay(name, hostile, "-77", ["8", "a"]) < 1e9
    assert time.process_time() - started < 2


def test_the_page_names_all_of_them_and_its_commands_are_understood():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    for name in BUILT_IN:
        assert f"`{name}`" in page, name
    blocks = re.findall(r"^```\n(oblrpo .*?)^```", page, re.DOTALL | re.MULTILINE)
    words = [
        word
        for block in blocks
        for part in re.findall(r"--rewards (.*?)(?: --|$)", block, re.M)
        for word in shlex.split(part)
    ]
    assert len(words) > len(blocks) > 6
    of_rows(words)
