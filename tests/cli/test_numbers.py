"""Numbers that are not finite, collapses, and the checkpoint that is best: what a whole run makes of them."""

import json
import math

import pytest

from oblrpo import estimators
from oblrpo.runs import RunFolder
from tests.cli.conftest import complained, metrics_of, weights_of

pytestmark = pytest.mark.usefixtures("dense_reward")


def checkpoints(run):
    return {path.name for path in (run / "checkpoints").iterdir()}


def break_gradients(patched, broken):
    """Let the gradients of these steps, counted from 1, be infinite."""
    whole, calls = estimators.squared_norm, iter(range(1, 1000))

    def squared_norm(parameters):
        if next(calls) in broken:
            parameters[0].grad[:] = math.inf
        return whole(parameters)

    patched.setattr(estimators, "squared_norm", squared_norm)


def test_steps_that_are_not_finite_are_skipped_and_counted_and_end_the_run(small_run, oblrpo, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        break_gradients(patched, {1, 3, 4})
        result = small_run(steps=4, eval_steps=0, ledger_steps=0)
    complained(result, "the last 2 steps were skipped (a gradient was NaN or infinite)", "step_4.jsonl")
    assert "the last 2 steps were skipped" in (run / "failure.txt").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("skipped") for row in rows] == [None, 1, 0, 1, 1]
    assert [row["learning_rate"] == 0 for row in rows[1:]] == [True, False, True, True]
    assert "NaN or infinite in step 1: gradient." in rows[1]["warnings"][0]
    assert not any("warnings" in row for row in rows[3:])
    assert weights_of(run, 0) == weights_of(run, 1) != weights_of(run, 2) == weights_of(run, 3) == weights_of(run, 4)
    code, out, err = oblrpo("train", "--resume", "--output", run, "--steps", 6)
    assert code == 0, err
    assert "was NaN" not in out
    assert len(metrics_of(run)) == 7
    assert weights_of(run, 6) != weights_of(run, 4)


def test_a_skipped_step_leaves_a_resumed_run_alike(small_run, oblrpo, tmp_path, monkeypatch):
    for name, stops in (("whole", False), ("halves", True)):
        with monkeypatch.context() as patched:
            break_gradients(patched, {2})
            assert small_run(output=tmp_path / name, steps=2 if stops else 4, eval_steps=0)[0] == 0
        if stops:
            assert oblrpo("train", "--resume", "--output", tmp_path / name, "--steps", 4)[0] == 0
    assert weights_of(tmp_path / "whole", 4) == weights_of(tmp_path / "halves", 4)


@pytest.fixture
def accuracies(monkeypatch):
    """Held-out accuracies in the place of those that are measured."""
    from oblrpo.evaluation.sampled import heldout_accuracy
    from oblrpo.trainer import loop

    given = iter([0.1, 0.9, 0.9, 0.3, 0.2, 0.4])

    def told(*args, **kwargs):
        found, *others = heldout_accuracy(*args, **kwargs)
        return type(found)(**(vars(found) | {"value": next(given)})), *others

    monkeypatch.setattr(loop, "heldout_accuracy", told)


@pytest.mark.usefixtures("accuracies")
def test_the_best_checkpoint_is_kept_beside_the_newest(small_run, oblrpo, tmp_path):
    run = tmp_path / "run"
    code, out, err = small_run(eval_steps=1, save_total_limit=1)
    assert code == 0, err
    assert checkpoints(run) == {"step_1", "step_4"}
    assert "checkpoints/step_1" in out
    assert RunFolder(run).newest_whole()[0].name == "step_4"
    code, out, err = oblrpo("train", "--resume", "--output", run, "--steps", 5)
    assert code == 0, err
    assert "resuming after step 4" in out
    assert checkpoints(run) == {"step_1", "step_5"}
    assert [row["step"] for row in metrics_of(run)] == list(range(6))


@pytest.mark.usefixtures("accuracies")
def test_a_best_checkpoint_that_is_damaged_is_set_aside(small_run, oblrpo, tmp_path):
    run = tmp_path / "run"
    assert small_run(eval_steps=1, save_total_limit=1)[0] == 0
    weights = run / "checkpoints" / "step_1" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    complained(
        oblrpo("train", "--model", weights.parent, "--warm-start-steps", 0, "--output", tmp_path / "other"),
        "step_1 is damaged (model.safetensors is not what was written)",
    )
    complained(oblrpo("evaluate", weights.parent), "step_1 is damaged")
    code, out, err = oblrpo("train", "--resume", "--output", run, "--steps", 5)
    assert code == 0, err
    assert "the checkpoint of step 1 is damaged" in " ".join((out + err).split())
    assert checkpoints(run) == {"damaged_step_1", "step_5"}  # which measured more than step 4


def test_a_collapse_ends_the_run_if_asked_to(small_run, oblrpo, tmp_path, monkeypatch):
    """Rewards fall from about 1 to 0 after twelve steps of twelve completions (and ten before them)."""
    calls = iter(range(10_000))

    def reward(*_):
        number = next(calls)
        return 0.9 + number % 5 / 50 if number < 10 + 12 * 12 else 0.0

    monkeypatch.setattr("oblrpo.tasks.PathTask.reward", reward)
    run = tmp_path / "run"
    told = "same reward: Nothing to learn from: every completion got the same reward, 0 in steps 1"
    complained(small_run("--stop-on-collapse", steps=30, eval_steps=0, ledger_steps=0), told)
    done = metrics_of(run)[-1]["step"]
    assert 12 < done < 25
    assert f"step_{done}" in checkpoints(run)
    assert told in (run / "failure.txt").read_text()
    complained(oblrpo("train", "--resume", "--output", run), told)
    assert metrics_of(run)[-1]["step"] == done + 1
    assert oblrpo("train", "--resume", "--output", run, "--no-stop-on-collapse")[0] == 0
    assert metrics_of(run)[-1]["step"] == 30
