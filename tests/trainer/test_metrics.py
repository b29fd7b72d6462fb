"""Metrics of a step by hand."""

import math
import statistics

import pytest
import torch

from oblrpo.trainer.metrics import _stderr

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
