"""Tasks by name on the command line: a summary's overlap, and those of reasoning-gym."""

import json

import pytest

from tests.cli.conftest import metrics_of


def test_a_run_on_summaries(small_run, tmp_path):
    code, _, err = small_run("--task", "summarise", "--warm-start-steps", "2", steps=2, max_completion_length=16)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions" / "step_2.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert all(row["prompt"].endswith("\nSummary:\n") and 0 <= row["reward"] <= 1 for row in rows)


def test_a_run_on_reasoning_gym(small_run, tmp_path):
    pytest.importorskip("reasoning_gym")
    arguments = ["--task", "reasoning_gym/chain_sum", "--task-args", "{max_terms: 2, prompt_template: '{prompt}'}"]
    settings = {"steps": 2, "warm_start_steps": 2}
    assert small_run(*arguments, **settings)[0] == 0
    assert len(metrics_of(tmp_path / "run")) == 3
    assert small_run(*arguments, output=tmp_path / "again", **settings)[0] == 0
    assert metrics_of(tmp_path / "again") == metrics_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("reasoning_gym/chain_sums", {}, "has no task 'chain_sums' among its"),
        ("reasoning_gym/chain_sum", {"task_args": "{max_term: 3}"}, "Did you mean 'max_terms'?"),
        ("summarise", {"eval_prompts": 18}, "has 17 held-out passages, but 18 were asked for"),
        ("summarise", {"task_args": "{size: 3}"}, "Task 'summarise' has no parameter 'size'"),
    ],
)
def test_mistakes_end_with_2(small_run, task, settings, words):
    if "gym" in task:
        pytest.importorskip("reasoning_gym")
    code, _, err = small_run("--task", task, **settings)
    assert code == 2
    assert words in " ".join(err.split())
