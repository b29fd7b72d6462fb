"""What ratios and samplers leave in the metrics, by hand, without a policy."""

import math
from types import SimpleNamespace

import pytest
import torch

from oblrpo.estimators import RATIOS, Prior, baseline
from oblrpo.step import Batch, StepBaseline
from oblrpo.step.flow import ImportanceWeights, clip_metrics, log_ratio

OWN_SC = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]])
REWARDS_PG = torch.tensor([[1.0, 0.0], [0.5, 9.0], [1.0, 0.0]])
VALID_PG = torch.tensor([[True, True], [True, False], [True, True]])  # the advantages .5, -.5, 0, none, .5 and -.5


def gradient(clipped):
    return SimpleNamespace(
        batch=SimpleNamespace(valid_PG=VALID_PG, sequences=SimpleNamespace(own_SC=OWN_SC)),
        advantages_PG=torch.tensor([[0.5, -0.5], [0.0, 0.0], [0.5, -0.5]]),
        weighed=SimpleNamespace(clipped=clipped),
    )


CLIPPED_SC = torch.tensor(
    # Of what stands behind an end, or has no reward, nothing counts; what has an advantage of 0 is not clipped.
    [[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]],
    dtype=torch.bool,
)


def test_shares_of_clipped_tokens_are_of_all_tokens_that_count():
    """3 + 2 + 4 + 1 + 1 tokens count."""
    assert clip_metrics(gradient(CLIPPED_SC), RATIOS["ppo"]) == pytest.approx(
        {
            "clip_ratio/low_mean": 3 / 11, "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 11, "clip_ratio/high_max": 1 / 3, "clip_ratio/region_mean": 4 / 11,
        }
    )  # fmt: skip
    assert clip_metrics(gradient(CLIPPED_SC), RATIOS["cispo"]) == pytest.approx({"cispo_clip_ratio": 1 / 11})


def test_shares_of_clipped_completions_are_of_those_that_count():
    clipped_S1 = torch.tensor([[1], [0], [0], [1], [1], [1]], dtype=torch.bool)
    assert clip_metrics(gradient(clipped_S1), RATIOS["gspo"]) == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 5, "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 2 / 5, "clip_ratio/high_max": 1.0, "clip_ratio/region_mean": 3 / 5,
        }
    )  # fmt: skip
    assert clip_metrics(gradient(clipped_S1), RATIOS["sequence"]) == {}


def test_log_probabilities_may_lie_above_0_by_rounding_alone():
    zeros_SC, mask_SC = torch.zeros(1, 2), torch.tensor([[1, 1]])
    ratio_S, difference_N = log_ratio(zeros_SC, torch.tensor([[5e-4, -1.0]]), mask_SC)
    assert (float(ratio_S[0]), difference_N.tolist()) == (pytest.approx(1 - 5e-4), pytest.approx([5e-4, 1.0]))
    with pytest.raises(ValueError, match="above 0"):
        log_ratio(zeros_SC, torch.tensor([[2e-3, -1.0]]), mask_SC)


@pytest.mark.parametrize(("ratio", "rho", "compared"), [("ppo", math.exp(0.5), 0.5), ("sequence", math.exp(0.8), 0.8)])
def test_later_updates_compare_the_sampler_with_the_policy_that_drew(ratio, rho, compared):
    """Old log pi is .5 above the sampler's, and .3 below the policy's now.

    The whole importance weight is taken against the sampler at once; any other multiplies that of the old policy.
    """
    old_SC, sampler_SC, now_SC = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-0.7]])
    weights = ImportanceWeights(RATIOS[ratio], math.inf, sampler_SC, old_SC)
    weighed = weights(torch.tensor([0]), now_SC, torch.ones(1, 1), torch.ones(1))
    assert float(weighed.rho_S) == pytest.approx(rho)
    assert float(weighed.log_ratio_S) == pytest.approx(compared)


def test_the_mean_length_is_of_outputs_that_count():
    sequences = SimpleNamespace(lengths_S=OWN_SC.sum(1))
    assert Batch.of(sequences, REWARDS_PG, VALID_PG).mean_length == pytest.approx((3 + 2 + 4 + 1 + 1) / 5)


def test_the_prior_remembers_what_rewards_were_weighed_by():
    """A batch's baseline is taken under the prior of before; what a pass saw is the past once its step has ended."""
    generator = torch.Generator().manual_seed(0)
    rewards_PG, norm2_PG = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
    past, expected = StepBaseline("oblr_shrunk"), Prior()
    for _ in range(2):
        begun = past.begin()
        found_PG = begun.of(rewards_PG, torch.ones(3, 4).bool(), torch.ones(3, 4, 5), norm2_PG)
        torch.testing.assert_close(found_PG, baseline("oblr_shrunk", rewards_PG, norm2_PG=norm2_PG, prior=expected))
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(past.prior.state_dict()[name], value)
        expected.observe(rewards_PG, norm2_PG)
        expected.next_step()
        past.end_step(begun)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(past.prior.state_dict()[name], value)
