"""Named benchmarks: rows as published, errors that name the place, and the published files where they are at hand."""

import json
import os
import random
import re
import sys
import types

import pytest

from oblrpo.errors import InputError
from oblrpo.tasks.benchmarks import BENCHMARKS, load_benchmark

ROWS = {
    "gsm8k": ({"question": "How many?", "answer": "Twice 4 is <<2*4=8>>8.\n#### 1,008"}, ("1,008",)),
    "math500": ({"problem": "Half?", "solution": "", "answer": r"\frac12"}, (r"\frac12",)),
    "aime24": ({"problem": "Which?", "answer": "067"}, ("067",)),
    "aime25": ({"problem": "Which?", "answer": "25"}, ("25",)),
    "amc23": ({"question": "Which?", "answer": 27.0}, ("27",)),
    "olympiadbench": (
        {"question": "All?", "final_answer": ["$1$,$\\frac{3}{2}$"], "is_multiple_answer": True},
        ("1", "\\frac{3}{2}"),
    ),
    "minerva_math": ({"problem": "Energy?", "solution": r"So \boxed{1} \[ \boxed{6.5e21} \] erg."}, ("6.5e21",)),
}
PUBLISHED = {"gsm8k": ["gsm8k_test"], "aime25": ["aime25_I", "aime25_II"]}
SIZES = {
    "gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30, "amc23": 40, "olympiadbench": 675, "minerva_math": 272,
}  # fmt: skip


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def golds_of(problem):
    gold = problem.columns["answer"]
    return (gold,) if isinstance(gold, str) else tuple(gold)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_as_published(name, tmp_path):
    row, golds = ROWS[name]
    files = [write(tmp_path / "a.jsonl", row, row), write(tmp_path / "b.jsonl", row)]
    problems = load_benchmark(name, files)
    assert len(problems) == 3
    assert golds_of(problems[2]) == golds
    assert problems[2].question == row.get("question", row.get("problem"))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gsm8k", {"answer": "42"}, "'answer' holds no gold answer after ####"),
        ("gsm8k", {"question": None}, "'question' holds a JSON null"),
        ("math500", {"answer": ""}, "'answer' is empty"),
        ("amc23", {"answer": [1]}, "'answer' holds a JSON array"),
        ("olympiadbench", {"final_answer": "1"}, "'final_answer' must be a list"),
        ("olympiadbench", {"final_answer": [""]}, "'final_answer' must be a list"),
        ("olympiadbench", {"is_multiple_answer": "no"}, "'is_multiple_answer' must be true or false"),
        ("minerva_math", {"solution": r"It is \boxed{1."}, "'solution' holds no gold answer"),
    ],
)
def test_bad_rows_are_named_by_file_line_and_column(name, change, words, tmp_path):
    row = ROWS[name][0]
    path = write(tmp_path / "data.jsonl", row, row | change)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        load_benchmark(name, [str(path)])
    assert "data.jsonl line 2" in str(caught.value)


def test_a_missing_column_and_an_unknown_name(tmp_path):
    path = write(tmp_path / "data.jsonl", {"problm": "x", "answer": "1"})
    with pytest.raises(InputError, match=r"line 1 has no column 'problem'.*Did you mean 'problm'"):
        load_benchmark("math500", [str(path)])
    with pytest.raises(InputError, match=r"unknown benchmark 'maths500'.*Did you mean 'math500'"):
        load_benchmark("maths500", [str(path)])
    with pytest.raises(InputError, match="Cannot read the data file"):
        load_benchmark("math500", [str(tmp_path / "none.jsonl")])


def test_the_hub_through_datasets(monkeypatch):
    asked = []

    def load_dataset(*arguments, **named):
        asked.append((arguments, named))
        return [ROWS["gsm8k"][0]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, __spec__=1))
    assert golds_of(load_benchmark("gsm8k")[0]) == ("1,008",)
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]

    def no_network(*arguments, **named):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", no_network)
    with pytest.raises(
        InputError, match=r"load openai/gsm8k \(test\) from the hub: no route to host; or give a file \(--data\)"
    ):
        load_benchmark("gsm8k")


def test_rows_are_kept_by_their_columns(tmp_path):
    row = ROWS["math500"][0]
    path = write(tmp_path / "data.jsonl", row | {"level": 1}, row | {"level": 5, "problem": "hard"})
    assert [p.question for p in load_benchmark("math500", [str(path)], where={"level": [4, 5]})] == ["hard"]
    with pytest.raises(InputError, match=r"line 1 has no column 'levle'. Did you mean 'level'"):
        load_benchmark("math500", [str(path)], where={"levle": 1})
    with pytest.raises(InputError, match="leaves none of 2 rows"):
        load_benchmark("math500", [str(path)], where={"level": "5"})


def test_no_file_and_no_datasets(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"datasets is needed to load HuggingFaceH4.* 'oblrpo\[data\]'"):
        load_benchmark("math500")


@pytest.fixture(params=BENCHMARKS)
def published(request):
    folder = os.environ.get("OBLRPO_BENCHMARK_DATA")
    if not folder:
        pytest.skip("OBLRPO_BENCHMARK_DATA names no folder with the published files")
    files = [f"{folder}/{stem}.jsonl" for stem in PUBLISHED.get(request.param, [request.param])]
    return request.param, load_benchmark(request.param, files)


def test_published_golds_are_their_own_answers(published, verifier):
    name, problems = published
    assert len(problems) == SIZES[name]
    plain = [[re.sub(r"(?<!\\)\$", "", gold).strip() for gold in golds_of(problem)] for problem in problems]
    for form in (
        lambda golds: f"Hence $$\\boxed{{\\,{', '.join(golds)}}}$$",
        lambda golds: f"The answer is {', '.join(f'${gold}$' for gold in golds)}.",
        lambda golds: f"\\boxed{{{', '.join(golds)}}}".replace(r"\frac", r"\dfrac").replace("(", r"\left("),
    ):
        verdicts = verifier.grade([golds_of(problem) for problem in problems], [form(golds) for golds in plain])
        assert not [p for p, verdict in zip(problems, verdicts, strict=True) if not verdict.correct]


def test_published_golds_reject_what_is_changed(published, verifier):
    _, problems = published
    rng = random.Random(0)
    golds, answers = [], []
    for problem in rng.sample(problems, min(len(problems), 60)):
        text = re.sub(r"\\?\$", "", ", ".join(golds_of(problem)))
        other = re.sub(r"\\?\$", "", ", ".join(golds_of(rng.choice(problems))))
        changed = [re.sub(r"(?<![\d.,_])\d+(?![\d.,])", lambda m: str(int(m[0]) + 1), text, count=1), other]
        changed += ["-" + text] if re.fullmatch(r"[1-9]\d*", text) else []
        for answer in changed:
            if "".join(answer.split()) != "".join(text.split()):
                golds.append(golds_of(problem))
                answers.append(f"\\boxed{{{answer}}}")
    verdicts = verifier.grade(golds, answers)
    wrong = [(gold, answer) for gold, answer, v in zip(golds, answers, verdicts, strict=True) if v.correct]
    # Another row may hold an equal answer in another spelling, as 27 and 27.0; none of these is.
    assert not wrong
