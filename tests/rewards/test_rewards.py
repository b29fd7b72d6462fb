"""Rewards: found by name or path, weighted, timed, and named when they fail."""

import math
import random
import time

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.rewards import Rewards
from oblrpo.tasks import DataTask, Problem, make_task
from oblrpo.user_code import load_named
from tests.rewards.conftest import RewardSet

SOURCE = """
import math
def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
def right(prompts, completions, answer, **columns):
    return [1 if text == gold else 0 for text, gold in zip(completions, answer)]
def odd_only(completions, **columns):
    return [1.0 if len(text) % 2 else None for text in completions]
def nothing(completions, **columns):
    return [None] * len(completions)
def not_a_number(completions, **columns):
    return [math.nan] + [1.0] * (len(completions) - 1)
def text(completions, **columns):
    return ["1"] * len(completions)
def short(completions, **columns):
    return [1.0]
def one(completions, **columns):
    return 1.0
def hangs(completions, **columns):
    import re
    return [1.0 if re.match("(a+)+$", "a" * 40 + "b") else 0.0]
def leaves(completions, **columns):
    import os
    os._exit(3)
def talks(completions, **columns):
    print("to nobody's harm")
    return [1.0] * len(completions)
def raises(completions, **columns):
    return [1 / 0]
def raises_later(completions, **columns):
    yield 1 / 0
def reads(completions, **columns):
    return [float(input())]
def forks(completions, **columns):
    import multiprocessing, time
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    time.sleep(60)
value = 3
"""
PROMPTS, TEXTS = ["p", "p", "q"], ["a", "bb", "ccc"]

BOTH = [[True, True]]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return lambda name: f"{file}:{name}"


def test_by_module_and_by_file(path):
    assert load_named("math.sqrt") is math.sqrt
    assert load_named("os.path.basename")("a/b") == "b"
    assert load_named(path("length"))(PROMPTS, TEXTS) == [1.0, 2.0, 3.0]


def test_two_files_of_one_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def which(completions, **_):\n    return ['{folder}']\n")
    assert [load_named(f"{tmp_path / folder}/reward.py:which")([]) for folder in "ab"] == [["a"], ["b"]]


def test_a_file_with_a_dataclass(tmp_path):
    (tmp_path / "d.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 2\n"
        "def f(completions, **_):\n    return [A().x] * len(completions)\n"
    )
    assert RewardSet([f"{tmp_path}/d.py:f"])(PROMPTS, TEXTS) == [2.0] * 3


def test_weighted_sum_and_columns(path):
    rewards = RewardSet([path("length"), path("right") + "@10", path("odd_only") + "@-0.5"])
    assert rewards(PROMPTS, TEXTS, {"answer": ["a", "b", "ccc"]}) == [10.5, 2.0, 12.5]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "returned None for completion 0"),
        ("not_a_number", "returned nan for completion 0"),
        ("text", "returned '1' for completion 0"),
        ("short", "returned 1 values for 3 completions"),
        ("one", "returned a float, not a list"),
        ("hangs", "took longer than 1 s (reward_seconds)"),
        ("leaves", "its process ended before it answered"),
        ("raises", "raised ZeroDivisionError: division by zero (mine.py line"),
        ("raises_later", "raised ZeroDivisionError: division by zero (mine.py line"),
        ("reads", "raised EOFError"),
        ("right", "raised TypeError"),
    ],
)
def test_errors_are_named(path, name, words):
    with pytest.raises(InputError) as caught:
        RewardSet([path(name)], seconds=1)(PROMPTS, TEXTS)
    assert path(name) in str(caught.value)
    assert words in str(caught.value)


def test_errors_are_masked_and_counted(path):
    names = [path(name) for name in ("length", "not_a_number", "odd_only")]
    rewards = RewardSet(names, on_error="mask")
    assert rewards(PROMPTS, TEXTS) == [None, 3.0, 5.0]
    assert rewards(PROMPTS, TEXTS) == [None, 3.0, 5.0]
    for name in ("raises", "short", "one", "hangs", "leaves"):
        rewards = RewardSet([path("length"), path(name)], on_error="mask", seconds=1)
        assert rewards(PROMPTS, TEXTS) == [None] * 3
        rewards.close()
    assert RewardSet([path("nothing")], "mask")(PROMPTS, TEXTS) == [None] * 3


def test_a_reward_cannot_change_what_the_next_one_sees(tmp_path):
    (tmp_path / "r.py").write_text(
        "def spoil(prompts, completions, answer):\n    completions.clear(); answer.clear(); return [0, 0, 0]\n"
        "def count(prompts, completions, answer):\n    return [len(answer)] * len(completions)\n"
    )
    rewards = RewardSet([f"{tmp_path}/r.py:spoil", f"{tmp_path}/r.py:count"])
    assert rewards(PROMPTS, TEXTS, {"answer": [1, 2, 3]}) == [3.0] * 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nodots", "unknown reward 'nodots'; choose one of: math, exact"),
        ("numerc", "Did you mean 'numeric'?"),
        ("no way.f", "cannot be imported"),
        ("no.such.module", "cannot be imported: ModuleNotFoundError"),
        ("math.sqr", "has no function 'sqr'; write math.sqrt; it defines: "),
        ("/no/file.py:f", "/no/file.py does not exist"),
        ("math.sqrt@heavy", "the weight after @ is 'heavy'"),
        ("math.sqrt@nan", "the weight after @ is 'nan'"),
        ("math.pi", "is a float, not a function"),
    ],
)
def test_bad_paths(given, words):
    with pytest.raises(InputError) as caught:
        RewardSet([given])
    assert words in str(caught.value)


def test_bad_sets(path, tmp_path):
    with pytest.raises(InputError, match="given twice"):
        RewardSet([path("length"), path("length") + "@2"])
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(InputError, match="cannot be imported: SyntaxError"):
        load_named(f"{tmp_path}/broken.py:f")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"must end in \.py"):
        load_named(f"{tmp_path}/notes.txt:f")


def test_what_to_type_for_a_function_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from math import sqrt\ndef digits(completions): ...\ndef _own(): ...\ndef vowels(completions): ...\n"
    )
    (tmp_path / "empty.py").touch()
    monkeypatch.chdir(tmp_path)
    first = r"write mine\.py:digits; it defines: digits, vowels\.$"
    said = {
        "mine.digits": r"No module named 'mine'\. Write mine\.py:digits for a function in that file\.$",
        "mine.py": f"'mine.py' does not name a function of the file; {first}",
        "mine": f"'mine.py' does not name a function of the file; {first}",
        "mine.py:typo": f"has no function 'typo'; {first}",
        "mine.py:vowel": r"has no function 'vowel'; write mine\.py:vowels; it defines",
        "empty.py:f": r"has no function 'f'; it defines: none\.$",
        "mine:digits": r"reward file mine does not exist; check the path\. Did you mean 'mine\.py'\?$",
        "statistics.meen": r"has no function 'meen'; write statistics\.mean; it defines",
    }
    for name, words in said.items():
        with pytest.raises(InputError, match=words):
            RewardSet([name])


def test_what_a_reward_prints_is_no_answer(path):
    assert RewardSet([path("talks")])(PROMPTS, TEXTS) == [1.0] * 3


def test_after_a_hang_the_next_call_is_answered(tmp_path):
    (tmp_path / "r.py").write_text(
        "import time\ndef slow(completions, **_):\n"
        "    time.sleep(9 if 'wait' in completions else 0)\n    return [2.0] * len(completions)\n"
    )
    rewards = RewardSet([f"{tmp_path}/r.py:slow"], "mask", seconds=2)
    assert rewards(["p"], ["wait"]) == [None]
    assert rewards(["p"], ["go"]) == [2.0]
    rewards.close()


def test_a_reward_that_hangs_with_processes_of_its_own_is_late_all_the_same(path):
    """A child that is left behind holds the pipe, so that only its end would be noticed."""
    rewards, started = RewardSet([path("forks")], "mask", seconds=1), time.monotonic()
    assert rewards(["p"], ["a"]) == [None]
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_any_time_may_be_given(path, seconds):
    assert RewardSet([path("length")], seconds=seconds)(["p"], ["abc"]) == [3.0]


@pytest.mark.parametrize("name", ["length", "math"])
def test_columns_of_any_name(path, name):
    columns = {"answer": ["1"], "self": ["x"], "path": ["y"]}
    assert RewardSet([path(name) if name == "length" else name])(["p"], ["1"], columns) == [1.0]


def test_built_in_ones():
    rewards = RewardSet(["math", "format@0.1", "length@-0.01"])
    texts = [r"So \boxed{0.5}", "one half, 0.5", r"\boxed{2"]
    assert rewards(["p"] * 3, texts, {"answer": [r"\frac{1}{2}"] * 3}) == pytest.approx([1.08, 0.97, -0.01])
    rewards.close()
    assert RewardSet(["exact"])(["p"], [" a  b "], {"answer": ["a b"]}) == [1.0]
    assert RewardSet(["numeric"])(["p"], ["so 1,000"], {"answer": [1e3]}) == [1.0]


def test_messages_in_messages_out_as_in_trl(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, level, **_):\n"
        "    said = [p[-1]['content'] + c[0]['content'] for p, c in zip(prompts, completions)]\n"
        "    return [len(text) + number for text, number in zip(said, level)]\n"
    )
    problem = Problem([{"role": "user", "content": "four"}], "", {"level": 100})
    task = DataTask("mine", [problem], [problem], default_rewards=[f"{tmp_path}/r.py:f"])
    assert Rewards(task)([problem], ["a", "bb"]) == ([[105.0, 106.0]], BOTH)


def test_the_tasks_own_and_others():
    task = make_task("path")
    problem = task.train_batch(0, 1)[0]
    right = task.demonstration(problem, random.Random(0), 0.0)
    assert Rewards(task)([problem], [right, "zz"]) == ([[1.0, 0.0]], BOTH)
    assert Rewards(task, ["task", "length@0.5"])([problem], [right, "z z z"]) == ([[1.5, 1.5]], BOTH)
    with pytest.raises(InputError, match="unknown reward 'task'"):
        Rewards(DataTask("mine", []), ["task"])


def python_rewards(function, on_error="raise"):
    return Rewards(DataTask("mine", []), ["python:f"], on_error, functions={"python:f": function})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, **_: [1.0], "'python:f' returned 1 values for 2 completions"),
        (lambda completions, **_: 3.0, "'python:f' returned a float, not a list of numbers"),
        (lambda completions, **_: ["1", "2"], "'python:f' returned '1' for completion 0"),
        (
            lambda completions, **_: (1 / 0 for _ in completions),
            "'python:f' raised ZeroDivisionError: division by zero",
        ),
        (lambda completions, **_: {0: 1.0, 1: 2.0}, "'python:f' returned a dict, not a list of numbers"),
        (lambda completions, **_: "12", "'python:f' returned a str, not a list of numbers"),
        (lambda completions, **_: {1.0, 2.0}, "'python:f' returned a set, not a list of numbers"),  # in no order
        (lambda completions, **_: {1.0: 0, 2.0: 0}.keys(), "'python:f' returned a dict_keys, not a list of numbers"),
        (lambda completions, level, **_: [1.0, 1.0], "'level'; it can be given answer, prompts, completions"),
    ],
)
def test_errors_of_a_callable_are_those_of_a_path(function, words):
    with pytest.raises(InputError) as caught:
        python_rewards(function)([Problem("p", "1")], ["a", "b"])
    assert words in str(caught.value)
    rewards = python_rewards(function, "mask")
    assert rewards([Problem("p", "1")], ["a", "b"]) == ([[0.0, 0.0]], [[False, False]])


def test_a_callable_may_return_what_has_numbers_and_see_any_object():
    thing = object()
    problems = [Problem("p", "1", {"thing": thing})]
    rewards = python_rewards(lambda completions, thing, **_: torch.tensor([len(text) for text in completions]))
    assert rewards(problems, ["a", "bb"]) == ([[1.0, 2.0]], BOTH)
    seen = []
    python_rewards(lambda completions, thing, **_: seen.extend(thing) or [0.0] * len(completions))(problems, ["a"])
    assert seen == [thing]


def test_a_callable_cannot_spoil_the_problems():
    def spoil(prompts, completions, answer):
        prompts[0][0]["content"] = answer[0] = "spoiled"
        prompts.clear()
        return [0.0] * len(completions)

    problem = Problem([{"role": "user", "content": "four"}], "4")
    python_rewards(spoil)([problem], ["a", "b"])
    assert (problem.text, problem.answer) == ("four", "4")


@pytest.mark.parametrize("value", [1e30, -1e13, 1e300, 10**400])
def test_rewards_beyond_what_a_gradient_holds(value):
    def huge(completions, **_):
        return [value, 1.0]

    with pytest.raises(InputError, match=r"'python:f' returned .* at most 1e12 in size"):
        python_rewards(huge)([Problem("p", "1")], ["a", "b"])
    assert python_rewards(huge, "mask")([Problem("p", "1")], ["a", "b"]) == ([[0.0, 1.0]], [[False, True]])


def test_a_weight_that_makes_a_reward_too_large():
    for on_error in ("raise", "mask"):
        rewards = RewardSet(["length@1e20"], on_error)
        if on_error == "raise":
            with pytest.raises(InputError, match=r"'length' with its weight is 1e\+20 for completion 0"):
                rewards(["p"], ["a"])
        else:
            assert rewards(["p"], ["a"]) == [None]
