"""Metrics of a step by hand."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from oblrpo.step import Samples, StepResult
from oblrpo.trainer.loop import _stderr, part_metrics, step_metrics

ALL = [[True, True]] * 3


@pytest.mark.parametrize(
    ("rewards", "valid", "stderr"),
    [
        ([[1.0, 0.0], [0.0, 0.0]], ALL[:2], 1 / 4),  # sqrt(2 (1/4 + 1/4)) / 4
        # The mean of the five is 2/5, residuals of prompts 1 - 4/5, 0 - 4/5 and 1 - 2/5: sqrt(3/2 26/25) / 5.
        ([[1.0, 0.0], [0.0, 0.0], [1.0, 9.0]], [*ALL[:2], [True, False]], math.sqrt(3 / 2 * 26 / 25) / 5),
        ([[1.0, 0.0], [0.0, 0.0], [7.0, 9.0]], [*ALL[:2], [False, False]], 1 / 4),  # a prompt that takes no part
        ([[1.0, 0.0], [7.0, 9.0]], [[True, True], [False, False]], math.nan),
    ],
)
def test_the_standard_error_of_the_reward_is_over_prompts(rewards, valid, stderr):
    found = _stderr(torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid))
    assert found == pytest.approx(stderr, nan_ok=True)


def test_of_whole_groups_it_is_that_of_the_mean_of_independent_prompts():
    rewards_PG = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = statistics.stdev(rewards_PG.mean(1).tolist()) / math.sqrt(5)
    assert _stderr(rewards_PG, torch.ones(5, 3, dtype=torch.bool)) == pytest.approx(expected)


def test_rewards_of_a_step_with_a_gap_and_a_lone_reward():
    """Of six completions five have a reward; the second prompt, with one, says nothing of spread within prompts."""
    rewards_PG = torch.tensor([[1.0, 0.0], [9.0, 5.0], [2.0, 2.0]])
    valid_PG = torch.tensor([[True, True], [False, True], [True, True]])
    lengths_S, clipped_S = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([True, False, False, False, False, True])
    features = SimpleNamespace(entropy_S=torch.full((6,), 1.4))
    sequences = SimpleNamespace(lengths_S=lengths_S)
    rollouts = SimpleNamespace(sequences=sequences, clipped_S=clipped_S, features=features, episodes=None)
    step = StepResult(Samples(rollouts, rewards_PG, valid_PG), [], kl_PG=torch.full((3, 2), 0.7))
    found = step_metrics(3, step, 21)
    expected = {
        "step": 3, "num_tokens": 21, "reward": 2.0, "reward_min": 0.0, "reward_max": 5.0,
        "reward_iqr": 1.0,  # quartiles 1 and 2 of 0, 1, 2, 2 and 5
        "reward_std": math.sqrt(0.5) / 2, "frac_reward_zero_std": 1 / 2,
        "completions/mean_length": 3.5, "completions/clipped_ratio": 1 / 3, "completions/masked_ratio": 1 / 6,
        "kl": 6 * 0.7 / 21, "entropy": 6 * 1.4 / 21, "learning_rate": 0.0, "frac_prompts_masked": 1.0, "skipped": 0.0,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_parts_of_the_reward_spread_by_n_less_1():
    found = part_metrics({"right": [1.0, 0.0, 2.0], "alone": [3.0]})
    assert (found["rewards/right/mean"], found["rewards/right/std"]) == (1.0, 1.0)
    assert found["rewards/alone/mean"] == 3.0
    assert math.isnan(found["rewards/alone/std"])
