"""`python -m lab.probe` on a run and on a model."""

import re
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from lab.probe import Effort, curvature, probe_run
from tests.cli.conftest import metrics_of

pytestmark = pytest.mark.usefixtures("no_page")

EFFORT = ["--prompts", 6, "--outputs", 3, "--iterations", 3]


@pytest.mark.parametrize("schedule", ["debiased", "auto"])
def test_along_a_run(lab, small_run, dense_reward, tmp_path, schedule):
    small_run(save_steps=2, steps=4, schedule=schedule, baseline="oblr")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, out, err = lab("probe", tmp_path / "run", *EFFORT)
    assert code == 0, err
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["0", "2", "4"]
    assert out.count("by the upper estimate") == out.count("  next update") == 3
    assert out.count("improvement    bound") == 3 - out.count("moves nothing") >= 1
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before  # looking changes nothing


def test_the_next_update_is_the_one_that_the_run_made(small_run, dense_reward, tmp_path):
    small_run(save_steps=1, steps=3, schedule="debiased")
    rates = [row["learning_rate"] for row in metrics_of(tmp_path / "run")[1:]]
    places = list(probe_run(tmp_path / "run", Effort(6, 3, 2, 0)))
    assert [place.path.learning_rate for place in places[:3]] == rates
    files = [tmp_path / "run" / "checkpoints" / f"step_{step}" / "model.safetensors" for step in range(4)]
    weights = [torch.cat([weight.flatten() for _, weight in sorted(load_file(file).items())]) for file in files]
    moved = [float((after - before).double().norm()) for before, after in pairwise(weights)]
    assert [place.path.length for place in places[:3]] == pytest.approx(moved, rel=1e-6)
    for place in places:
        assert place.curvature.upper > 0
        assert place.curvature.rate == pytest.approx(1 / place.curvature.upper)
        assert (place.path.length > 0) == (place.path.learning_rate > 0)


def test_two_batches_that_share_nothing_and_weights_that_come_back(small_run, dense_reward, tmp_path, monkeypatch):
    small_run(save_steps=2, steps=2, schedule="off")
    drawn, policies = [], []
    real = curvature.draw

    def draw(policy, rewards, problems, rollout):
        drawn.append([problem.prompt for problem in problems])
        policies.append((policy, torch.nn.utils.parameters_to_vector(policy.parameters).detach().clone()))
        return real(policy, rewards, problems, rollout)

    monkeypatch.setattr(curvature, "draw", draw)
    places = list(probe_run(tmp_path / "run", Effort(6, 3, 2, 0)))
    assert len(drawn) == 2 * len(places) == 4
    assert all(each.path.length > 0 for each in places)
    for prompts in zip(*(map(tuple, drawn[k::2]) for k in range(2)), strict=True):
        assert not set(prompts[0]) & set(prompts[1])
    for policy, before in policies:
        assert torch.equal(torch.nn.utils.parameters_to_vector(policy.parameters), before)


def test_an_untrained_run_whose_completions_earn_nothing(lab, small_run, tmp_path):
    """The task's own reward: random completions find no route, so that nothing is known of J around there."""
    small_run(save_steps=1, steps=1)
    code, out, err = lab("probe", tmp_path / "run", *EFFORT)
    assert code == 0, err
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["0", "1"]
    assert out.count("curvature      unknown: no reward varies") == 2
    assert "which varies on 0 and 0 of 6 prompts" in out


def test_a_schedule_that_has_ended(lab, small_run, dense_reward, tmp_path):
    """After the last step of a linear schedule the rate is 0."""
    small_run(save_steps=2, steps=2, lr_scheduler_type="linear", schedule="off")
    code, out, err = lab("probe", tmp_path / "run", *EFFORT)
    assert code == 0, err
    assert out.count("next update    rate 0: it moves nothing") == 1
    assert "moves nothing" in out.split("step 2:")[1]


def test_the_device_of_a_run_can_be_another(lab, small_run, dense_reward, tmp_path):
    """A run that was saved with cuda, on a machine without."""
    small_run(steps=1)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("device: cpu", "device: cuda:99"))
    code, _, err = lab("probe", tmp_path / "run", *EFFORT)
    assert code == 2
    assert "'cuda:99' cannot be used" in err
    code, _, err = lab("probe", tmp_path / "run", *EFFORT, "--device", "cpu")
    assert code == 0, err


def test_of_a_model(lab, small_run, dense_reward, tmp_path):
    small_run(steps=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    code, out, err = lab("probe", checkpoint, *EFFORT, "--max-completion-length", 6, "--device", "cpu")
    assert code == 0, err
    assert out.startswith("step 0: reward")
    assert "next update" not in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["no/such/model"], "is no folder of a run or a model"),
        (["runs/none"], "is no folder of a run or a model"),
        (["nothing"], "is no folder of a run or a model"),
        (["./a"], "is no folder of a run or a model"),
        (["RUN/nothing"], "is no folder of a run or a model"),
        (["RUN/config.yaml"], "is no folder of a run or a model"),
        ([""], "give the folder of a run, or a model"),
        (["RUN/completions"], "cannot load the model"),
        (["RUN", "--outputs", "1"], "at least 4 prompts, 2 outputs"),
        (["RUN", "--prompts", "3"], "at least 4 prompts, 2 outputs"),
        (
            ["RUN", "--temperature", "0.5"],
            "is a run, which knows its task, model and sampling; leave out --temperature.",
        ),
        (["RUN", "--temperature", "1.0"], "leave out --temperature."),
        (["RUN", "--max_completion_length=512"], "leave out --max_completion_length."),
        (["RUN", "--no-trust-remote-code"], "leave out --no-trust-remote-code."),
        (["RUN", "--task", "addition"], "leave out --task."),
        (["RUN", "--probe-seed", "9" * 23], "probe_seed is 999"),
        (["RUN/completions", "--temperature", "0"], "temperature is 0.0"),
    ],
)
def test_bad_input(lab, small_run, tmp_path, arguments, word):
    small_run(steps=0)
    asked = [re.sub("^RUN", str(tmp_path / "run"), each) for each in arguments]
    code, _, err = lab("probe", *asked)
    assert code == 2
    assert word in err


def test_a_run_without_a_checkpoint(lab, small_run, tmp_path):
    small_run(steps=0)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    code, _, err = lab("probe", tmp_path / "run")
    assert code == 2
    assert "no checkpoint" in err
