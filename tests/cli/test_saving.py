"""When a run writes checkpoints, where it is not told by number."""

import time

import pytest

from oblrpo.runs import RunFolder


def steps_of(run):
    return RunFolder(run).checkpoint_steps()


@pytest.mark.usefixtures("dense_reward")
def test_checkpoints_take_their_share_of_the_time(small_run, oblrpo, tmp_path, monkeypatch):
    """Slow ones are those before the first step and after the last; a kill in between loses what was cheap to make."""
    save = RunFolder.save_checkpoint

    def slow(*arguments):
        time.sleep(1.0)
        save(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_checkpoint", slow)
        assert small_run(save_steps=None, eval_steps=0, steps=6)[0] == 0
    assert steps_of(tmp_path / "run") == [0, 6]
    monkeypatch.setattr("oblrpo.trainer.loop.SAVING_SHARE", 1.0)
    assert small_run(save_steps=None, eval_steps=0, steps=6, output=tmp_path / "all")[0] == 0
    assert steps_of(tmp_path / "all") == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("dense_reward")
def test_the_best_so_far_is_kept_whatever_it_costs(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr("oblrpo.trainer.loop.SAVING_SHARE", 1e-9)
    accuracies = iter([0.1, 0.3, 0.2, 0.4, 0.4, 0.0])
    found = type("Found", (), {"stderr": 0.01, "value": property(lambda _: next(accuracies))})
    monkeypatch.setattr("oblrpo.trainer.loop.heldout_accuracy", lambda *_, **__: (found(), [], None))
    assert small_run(save_steps=None, eval_steps=1, steps=5)[0] == 0
    assert steps_of(tmp_path / "run") == [0, 1, 3, 5]
