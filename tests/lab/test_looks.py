"""Looks at several policies of a run, and their mean."""

import math

import pytest

from lab.looks import looks_at, table
from oblrpo.tasks.path import PathTask
from oblrpo.trainer.look import FIRST_STEP, look
from tests.trainer.test_look import seen_at


def test_the_mean_over_policies_takes_what_is_negative_by_chance_as_it_is():
    """N SNR .25, -.125 and .5, a mean of .208; with 0 for the second it would be .25."""
    margin = 4.30265 * math.sqrt(0.0989583 / 3)  # Student's t of 2 degrees of freedom, variance (n - 1)
    lines = table([seen_at(30, (1.0, 3.0)), seen_at(20, (-2.0, 0.0)), seen_at(10, (4.0, 4.0), 0.2)]).splitlines()
    assert lines[2:] == [
        "| 30 | 0.25 (0.00 to 1.84) | 64 (9 or more) |  |",
        "| 20 | 0.00 (0.00 to 1.46) | no signal |  |",
        "| 10 | 0.50 (0.50 to 0.50) | 32 (32 to 32) | 0.20 |",
        f"| mean | 0.21 (0.00 to {0.625 / 3 + margin:.2f}) | 77 ({16 / (0.625 / 3 + margin):.0f} or more) |  |",
    ]


@pytest.mark.slow
def test_each_policy_has_prompts_of_its_own(small_run, dense_reward, tmp_path, monkeypatch):
    """Steps 0, 1 and 2 are kept; one that is damaged is passed over, and the newest is seen as it is alone."""
    assert small_run(steps=2, eval_steps=0, ledger_steps=0)[0] == 0
    run = tmp_path / "run"
    state = next((run / "checkpoints" / "step_1").glob("*model*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1])
    alone, drawn, draw = look(run, 8), [], PathTask.train_batch
    monkeypatch.setattr(PathTask, "train_batch", lambda self, step, size: drawn.append(step) or draw(self, step, size))
    found = looks_at(run, 3, 8)
    assert [each.step for each in found] == [2, 0]
    assert found[0] == alone
    assert drawn == [FIRST_STEP + number for number in range(8)]
