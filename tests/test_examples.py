"""The examples that are no script: `examples/summaries`, rows and a reward of one's own."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.cli.conftest import no_page, oblrpo, small_run

__all__ = ["no_page", "oblrpo", "small_run"]

FOLDER = Path(__file__).parents[1] / "examples" / "summaries"
SPEC = importlib.util.spec_from_file_location("overlap", FOLDER / "overlap.py")
overlap = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(overlap)


@pytest.mark.parametrize(
    ("reference", "text", "value"),
    [  # the last three as rouge-score 0.1.2 has them
        ("the cat sat", "the cat sat", 1.0),
        ("The cat sat.", "the CAT -- sat", 1.0),
        ("the cat sat", "sat cat the", 1 / 3),
        ("the cat sat", "", 0.0),
        ("", "the cat", 0.0),
        ("the cat sat", "dogs", 0.0),
        ("the cat sat", "the the the the the the", 2 / 9),
        ("Paul's lost ring came back on a carrot.", "Paul lost a ring, a carrot had it", 0.5882352941176471),
        ("The ferry left at noon", "At noon the first ferry left the harbour at last", 0.5333333333333333),
        ("police killed the gunman", "police kill the gunman", 0.75),
    ],
)
def test_the_overlap_in_words(reference, text, value):
    assert overlap.f1(reference, text) == pytest.approx(value, abs=1e-15)
    assert overlap.rouge_l([text], [["another", reference]]) == [pytest.approx(value, abs=1e-15)]


@pytest.mark.usefixtures("no_page")
def test_a_run_on_summaries(small_run, tmp_path):
    passages = FOLDER / "passages.jsonl"
    code, _, err = small_run(
        data=passages, sft_data=passages, rewards=f"{FOLDER / 'overlap.py'}:rouge_l", warm_start_steps=2,
        prompt_template="{prompt}\nSummary:\n", heldout_fraction=0.25, steps=2, max_completion_length=16,
    )  # fmt: skip
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions" / "step_2.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert all(row["prompt"].endswith("\nSummary:\n") and 0 <= row["reward"] <= 1 for row in rows)
