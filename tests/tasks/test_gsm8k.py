"""GSM8K reference answers: five rows in its format always, the published files where they are at hand."""

import json
import os
import re
from pathlib import Path

import pytest

from oblrpo.rewards.built_in import Numeric
from tests.tasks.data import task_of_file

SAMPLE = [
    "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nThat makes 9 * 2 = $<<9*2=18>>18.\n#### 18",
    "2/2=<<2/2=1>>1 bolt, so 2+1=<<2+1=3>>3.\n#### 3",
    "The value rose by 80,000*1.5=<<80000*1.5=120000>>120,000.\n#### 1,120,000",
    "It fell from 3 to 3-10=<<3-10=-7>>-7 degrees.\n#### -7",
    "Half of 5 is 5/2=<<5/2=2.5>>2.5\n#### 2.5",
]
PUBLISHED = Path(os.environ.get("OBLRPO_BENCHMARK_DATA", "nowhere"))
FILES = [path for path in (PUBLISHED / "gsm8k_train.jsonl", PUBLISHED / "gsm8k_test.jsonl") if path.exists()]


@pytest.fixture(params=["sample", *FILES], ids=lambda source: getattr(source, "name", source))
def path(request, tmp_path):
    if request.param != "sample":
        return request.param
    rows = [{"question": f"Question {number}?", "answer": answer} for number, answer in enumerate(SAMPLE)]
    (tmp_path / "sample.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "sample.jsonl"


@pytest.fixture
def problems(path):
    count = len(path.read_bytes().splitlines())
    task = task_of_file(path, "question", "answer", numbers=True, heldout_fraction=0.0)
    return task.train_batch(0, count)


def test_every_gold_answer_is_its_own_answer_in_many_spellings(problems):
    for problem in problems:
        gold = problem.answer.rpartition("#### ")[2]
        plain = gold.replace(",", "")
        spellings = [problem.answer, gold, plain, f"The answer is {gold}.", f"\\boxed{{{plain}}}", f"It costs ${gold}."]
        assert Numeric()(spellings, answer=[problem.answer] * len(spellings)) == [1.0] * len(spellings)


def test_no_other_number_is_accepted(problems):
    for problem in problems:
        plain = problem.answer.rpartition("#### ")[2].replace(",", "")
        negated = plain[1:] if plain.startswith("-") else f"-{plain}"
        wrong = [f"{plain}1", f"{problem.answer}\n#### {plain}.5", re.sub(r"[0-9](?=\D*$)", "", plain)]
        wrong += [negated] if plain.strip("0.") else []
        assert Numeric()(wrong, answer=[problem.answer] * len(wrong)) == [0.0] * len(wrong)
