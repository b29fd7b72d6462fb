"""Tasks by name on the command line: those of reasoning-gym."""

import pytest

from tests.cli.conftest import metrics_of


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
    ],
)
def test_mistakes_end_with_2(small_run, task, settings, words):
    pytest.importorskip("reasoning_gym")
    code, _, err = small_run("--task", task, **settings)
    assert code == 2
    assert words in " ".join(err.split())
