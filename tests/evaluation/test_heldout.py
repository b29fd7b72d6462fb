"""Held-out accuracy where completions were masked."""

import math
from types import SimpleNamespace

import pytest
import torch

from oblrpo.config import RolloutConfig
from oblrpo.evaluation import heldout_accuracy


@pytest.mark.parametrize(
    ("rewards", "value", "stderr"),
    [
        ([[1.0, math.nan], [0.0, 0.5]], 0.625, 0.375),  # of 1 and 0.25
        ([[1.0, math.nan], [math.nan, math.nan]], 1.0, math.nan),
        ([[math.nan, math.nan], [math.nan, math.nan]], math.nan, math.nan),
    ],
)
def test_masked_completions_are_left_out(rewards, value, stderr):
    sampler = SimpleNamespace(sample=lambda *_: SimpleNamespace(completions=None))
    policy = SimpleNamespace(device=torch.device("cpu"))
    problems = [SimpleNamespace(prompt="a"), SimpleNamespace(prompt="b")]
    config = RolloutConfig(prompts_per_step=2, num_generations=2)
    found = heldout_accuracy(policy, lambda *_: rewards, problems, 2, config, 0, sampler)
    assert (found.value, found.stderr) == pytest.approx((value, stderr), nan_ok=True)
