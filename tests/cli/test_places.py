"""The folder of a run and the one that a process stands in may go away; a run stays where it began, or says so."""

import shutil

import pytest

from oblrpo.rewards.user import WorkerReward
from oblrpo.tasks import PathTask
from tests.cli.conftest import DENSE_REWARD, complained, metrics_of


@pytest.fixture
def at_call(monkeypatch):
    """`DENSE_REWARD` that does something at one of its calls; one step has twelve."""
    monkeypatch.setattr(PathTask, "reward", PathTask.reward)  # put back afterwards
    exec(DENSE_REWARD, {})
    dense = PathTask.reward

    def set_up(call, act):
        calls = iter(range(1, 1000))
        monkeypatch.setattr(PathTask, "reward", lambda *args: (next(calls) == call and act()) or dense(*args))

    return set_up


@pytest.mark.parametrize("command", [("train", "--output", "run"), ("train", "--output", "{}/run"), ("report", "run")])
def test_a_current_folder_that_is_gone(oblrpo, tmp_path, monkeypatch, command):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    complained(oblrpo(*(word.format(tmp_path) for word in command)), "the current folder no longer exists")


@pytest.mark.parametrize("away", ["elsewhere", "gone"])
def test_a_reward_that_goes_elsewhere_leaves_the_run_in_place(whole, small_run, at_call, tmp_path, monkeypatch, away):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)

    def wander():
        monkeypatch.chdir(there)
        if away == "gone":
            there.rmdir()

    at_call(20, wander)
    code, _, err = small_run(output="run")
    assert code == 0, err
    assert metrics_of(here / "run") == metrics_of(whole)
    assert (here / "run" / "checkpoints" / "step_4").is_dir()


@pytest.mark.parametrize("harm", ["renamed", "removed"])
def test_a_run_whose_folder_goes_away_ends_in_one_sentence(whole, small_run, oblrpo, at_call, tmp_path, harm):
    run, moved = tmp_path / "run", tmp_path / "moved"
    at_call(30, lambda: run.rename(moved) if harm == "renamed" else shutil.rmtree(run))
    complained(small_run(), f"{run} is gone: it was removed or renamed")
    assert not run.exists()
    if harm == "renamed":
        at_call(0, lambda: None)
        assert oblrpo("train", "--resume", "--output", moved)[0] == 0
        assert metrics_of(moved) == metrics_of(whole)


def test_a_reward_by_a_relative_path_is_found_again_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("def f(completions, **columns):\n    return [1.0 for each in completions]\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    reward = WorkerReward("reward.py:f", 60)
    monkeypatch.chdir(tmp_path / "elsewhere")
    reward.close()
    assert reward(prompts=["x"], completions=["y"]) == [1.0]
    reward.close()
