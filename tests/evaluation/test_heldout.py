"""Held-out accuracy where completions were masked."""

import math
from types import SimpleNamespace

import pytest
import torch

from oblrpo.evaluation.heldout import heldout_accuracy
from oblrpo.settings import RolloutConfig


@pytest.mark.parametrize(
    ("valid", "value", "stderr"),
    [
        ([[True, False], [True, True]], 0.625, 0.375),  # the means are 1 and 0.25
        ([[True, False], [False, False]], 1.0, math.nan),
        ([[False, False], [False, False]], math.nan, math.nan),
    ],
)
def test_masked_completions_are_left_out(tiny_policy, valid, value, stderr):
    sampler = SimpleNamespace(sample=lambda *_: SimpleNamespace(completions=None, ids=None))
    problems = [SimpleNamespace(prompt="a"), SimpleNamespace(prompt="b")]
    config = RolloutConfig(prompts_per_step=2, num_generations=2)
    before = torch.random.get_rng_state()
    found = heldout_accuracy(tiny_policy, lambda *_: ([[1.0, 9.0], [0.0, 0.5]], valid), problems, 2, config, 0, sampler)
    assert (found.value, found.stderr) == pytest.approx((value, stderr), nan_ok=True)
    assert torch.equal(torch.random.get_rng_state(), before)
