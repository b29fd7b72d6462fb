"""`oblrpo probe` on a run and on a model."""

import math
import re

import pytest
import torch

from oblrpo.probe import Effort, curvature, probe_run
from tests.cli.conftest import dense_reward, metrics_of, oblrpo, small_run  # noqa: F401

EFFORT = ["--prompts", 6, "--outputs", 3, "--iterations", 3]


@pytest.mark.parametrize("schedule", ["debiased", "auto"])
def test_along_a_run(oblrpo, small_run, dense_reward, tmp_path, schedule):  # noqa: F811
    small_run(save_steps=2, steps=4, schedule=schedule)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, out, err = oblrpo("probe", tmp_path / "run", *EFFORT)
    assert code == 0, err
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["0", "2", "4"]
    assert out.count("safe eta_0") == out.count("realised") == 3
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before  # looking changes nothing


def test_the_next_update_is_the_one_that_the_run_made(small_run, dense_reward, tmp_path):  # noqa: F811
    small_run(save_steps=1, steps=3, schedule="debiased")
    rates = [row["learning_rate"] for row in metrics_of(tmp_path / "run")[1:]]
    places = list(probe_run(tmp_path / "run", Effort(6, 3, 2, 0)))
    assert [place.path.learning_rate for place in places[:3]] == pytest.approx(rates, rel=1e-6)
    for place in places:
        assert place.in_sample > 0
        assert place.safe_rate > 0
        assert place.path.length >= 0


def test_of_a_model(oblrpo, small_run, dense_reward, tmp_path):  # noqa: F811
    small_run(steps=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    code, out, err = oblrpo("probe", checkpoint, *EFFORT, "--max-completion-length", 6, "--device", "cpu")
    assert code == 0, err
    assert out.startswith("step 0: reward")
    assert "next update" not in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["no/such/model"], "cannot load the model"),
        (["RUN", "--outputs", "1"], "at least 4 prompts, 2 outputs"),
        (["RUN", "--prompts", "3"], "at least 4 prompts, 2 outputs"),
        (["RUN", "--temperature", "0.5"], "is a run, which knows its task"),
        (["RUN", "--task", "addition"], "is a run, which knows its task"),
        (["no/such/model", "--temperature", "0"], "temperature is 0.0"),
    ],
)
def test_bad_input(oblrpo, small_run, tmp_path, arguments, word):  # noqa: F811
    small_run(steps=0)
    code, _, err = oblrpo("probe", *[tmp_path / "run" if each == "RUN" else each for each in arguments])
    assert code == 2
    assert word in err


def test_a_run_without_a_checkpoint(oblrpo, small_run, tmp_path):  # noqa: F811
    small_run(steps=0)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    code, _, err = oblrpo("probe", tmp_path / "run")
    assert code == 2
    assert "no checkpoint" in err


def test_a_missing_reward_is_refused(oblrpo, small_run, dense_reward, tmp_path, monkeypatch):  # noqa: F811
    small_run(steps=1)
    monkeypatch.setattr(curvature, "rewards_of", lambda task, problems, texts: torch.full((len(problems), 3), math.nan))
    code, _, err = oblrpo("probe", tmp_path / "run", *EFFORT)
    assert code == 2
    assert "a completion has no reward; a probe needs one of each" in err
