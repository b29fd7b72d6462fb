"""The update that a probe makes is the one that resuming the run makes next, bit for bit."""

import dataclasses
import math

import pytest
import torch

from lab.probe.next_update import standings
from oblrpo.rewards import Rewards
from oblrpo.rollout import TransformersSampler
from oblrpo.runs import RunFolder
from oblrpo.tasks import PathTask
from oblrpo.trainer.setup import load_checkpoint
from tests.cli.conftest import metrics_of

pytestmark = pytest.mark.usefixtures("no_page", "dense_reward")


def vector(policy):
    return torch.nn.utils.parameters_to_vector(policy.parameters).detach().clone()


@pytest.fixture
def the_same_update(small_run, oblrpo, tmp_path):
    """Train two steps, make the next update by a probe, then by resuming; returns the metrics of the latter."""

    def check(*arguments, **settings):
        run = tmp_path / "run"
        code, _, err = small_run(*arguments, steps=2, eval_steps=0, save_steps=1, **settings)
        assert code == 0, err
        *_, last = standings(run)
        before = vector(last.policy)
        rate = last.update()
        code, _, err = oblrpo("train", "--resume", "--output", run, "--steps", 3)
        assert code == 0, err
        resumed = load_checkpoint(run / "checkpoints" / "step_3", RunFolder(run).saved_config())
        row = metrics_of(run)[-1]
        assert last.step == 2
        assert row["step"] == 3
        assert rate == row["learning_rate"]
        assert torch.equal(vector(last.policy), vector(resumed))
        assert torch.equal(vector(resumed), before) == (rate == 0)
        return row

    return check


def test_with_a_correction_that_is_clipped(the_same_update, monkeypatch):
    """What the sampler says of itself is off by up to a tenth of a nat a token."""
    true = TransformersSampler.sample

    def off(self, *arguments):
        drawn = true(self, *arguments)
        told_SC = drawn.sampler_logps_SC - 0.1 * (drawn.sequences.completion_SC % 3 == 0)
        return dataclasses.replace(drawn, sampler_logps_SC=told_SC)

    monkeypatch.setattr(TransformersSampler, "sample", off)
    row = the_same_update(sampler_correction="truncated:1.15")
    assert 0 < row["sampling/truncated_ratio"] < 1
    assert row["sampling/importance_sampling_ratio/min"] < 1.15 == row["sampling/importance_sampling_ratio/max"]


def test_with_rewards_that_are_masked(the_same_update, monkeypatch):
    dense = PathTask.reward
    monkeypatch.setattr(PathTask, "reward", lambda *given: math.nan if len(given[2]) % 3 == 1 else dense(*given))
    row = the_same_update(on_reward_error="mask")
    assert 0 < row["completions/masked_ratio"] < 1


def test_with_hardly_a_reward_no_update_is_made(the_same_update, monkeypatch):
    whole = Rewards.__call__

    def none_in_training(self, problems, completions, ids):
        rewards, valid = whole(self, problems, completions, ids)
        return rewards, [[False] * 3 for _ in rewards] if len(rewards[0]) == 3 else valid

    monkeypatch.setattr(Rewards, "__call__", none_in_training)
    row = the_same_update(on_reward_error="mask")
    assert row["learning_rate"] == 0


def test_with_weights_that_are_learned_between_two_updates_on_a_batch(the_same_update):
    row = the_same_update(look_steps=1, num_iterations=2, ledger_steps=3)
    assert "score_norm2/agreement_calibrated" in row
    assert "variance/rloo" in row


def test_with_problems_that_are_left_out(the_same_update, tmp_path):
    """Long prompts change which problems a step draws."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{"ab" * n}", "answer": "{n}"}}\n' for n in range(1, 41)))
    reward = tmp_path / "rewards.py"
    reward.write_text("def length(completions, **_):\n    return [len(text) % 4 / 3 for text in completions]\n")
    the_same_update(data=data, rewards=f"{reward}:length", max_prompt_length=30, heldout_fraction=0.4)


def test_without_the_engine_the_update_is_refused(small_run, lab, tmp_path):
    small_run(steps=1)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("sampler: transformers", "sampler: vllm"))
    code, out, err = lab("probe", tmp_path / "run")
    assert code == 2
    assert not out
    message = " ".join(err.split())
    assert "the run's next update needs the run's sampler: the sampler vllm needs vLLM" in message
    assert "step_0` measures that policy without an update." in message
