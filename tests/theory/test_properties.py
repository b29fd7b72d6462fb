"""The theorems on random policies: no counterexample to what is true, one soon found to what is not."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oblrpo.theory import exact, identities, smoothness, theorems
from oblrpo.theory.worlds import FAMILIES, bandit, linear_bandit, transformer, tree

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def worlds(draw):
    """Small ones of every tabular family; the transformer is too large for groups of three."""
    seed, Q = draw(st.integers(0, 10**6)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["bandit", "linear bandit", "token tree"]))
    if kind == "token tree":
        return tree(seed, Q, length=draw(st.integers(1, 2)))
    return FAMILIES[kind](seed, Q, O=draw(st.integers(2, 4)), scale=draw(st.sampled_from([0.1, 1.0, 3.0])))


@few
@given(worlds(), st.integers(2, 3), st.sampled_from(["none", "rloo", "oblr", "oblr_crossfit"]), st.booleans())
def test_unbiased_baselines_are(world, G, name, off_policy):
    sampler_QO = (world.logp_QO + 0.3 * torch.sin(torch.arange(world.logp_QO.numel())).view_as(world.logp_QO)).softmax(
        1
    )
    assert theorems.unbiased(world, name, G, sampler_QO if off_policy else None).holds


@few
@given(worlds(), st.integers(1, 3), st.floats(-3, 3))
def test_covariances_are_those_of_the_formulas(world, G, baseline):
    fixed_Q = torch.full((len(world.rewards_QO),), baseline, dtype=torch.float64)
    assert theorems.fixed_baseline_covariance(world, G, fixed_Q).holds
    if G > 1:
        assert theorems.rloo_covariance(world, G).holds
        assert theorems.group_mean_is_scaled_rloo(world, G).holds
        assert identities.leverage(world, G).holds


@few
@given(worlds(), st.floats(-2, 2))
def test_no_fixed_baseline_is_quieter_than_the_optimal_one(world, other):
    best = exact.fixed_baseline_moments(world, exact.optimal_baseline(world), 2).trace
    shifted = exact.fixed_baseline_moments(world, exact.optimal_baseline(world) + other, 2).trace
    assert best <= shifted + 1e-12
    assert theorems.optimal_baseline(world).holds


@few
@given(worlds(), st.floats(0.01, 1.5))
def test_the_loss_bound_and_the_derived_constant(world, rate):
    if world.rewards_QO.numel() > 8:
        return
    assert theorems.loss_bound(world, [rate, rate / 2], smoothness.constants(world)["osc(F) L"]).holds
    assert all(claim.holds for claim in smoothness.bounds_hold(world, 2))


@few
@given(worlds(), st.integers(1, 64), st.floats(0.1, 10))
def test_the_best_rate(world, N, c):
    assert theorems.best_rate(world, N, 2, c).holds
    assert theorems.schedule_uses_it(world, N, 2).holds
    assert identities.noise_scale(world, N, 2, c).holds


@few
@given(st.floats(1e-4, 1.0), st.floats(-4, -0.5))
def test_the_papers_constant_fails_exactly_where_it_should(rewards, logit):
    """B^2 M < (c / B - L) B: for small B, and only where |J''| / B = 2 p (1-p) (1-2p) exceeds L = p (1-p)."""
    derived, direct, papers = smoothness.small_rewards_break_the_papers_constant(rewards, logit)
    assert derived.holds
    assert direct.holds
    p = 1 / (1 + torch.tensor(-logit, dtype=torch.float64).exp())
    excess = float(p * (1 - p) * (1 - 2 * (1 - p) if p > 0.5 else 1 - 4 * p))
    assert papers.holds == (excess <= rewards)


def test_in_sample_weights_are_biased_wherever_weights_and_rewards_differ():
    biased = [not identities.in_sample_is_not_unbiased(linear_bandit(seed), 2).holds for seed in range(20)]
    assert all(biased)


def test_a_wrong_formula_is_found_out():
    """Every check can fail: at other parameters, with a biased baseline, with a constant that is too small."""
    world = linear_bandit(3)
    wrong = world.at(world.theta_D + 0.1)
    assert (exact.optimal_baseline(world) - exact.optimal_baseline(wrong)).abs().max() > 1e-3
    assert not theorems.unbiased(world, "mean", 2).holds
    assert not theorems.unbiased(world, "eob", 2).holds
    assert (exact.rloo_moments(world, 2).cov_QDD - exact.rloo_moments(world, 3).cov_QDD).abs().max() > 1e-3
    assert not theorems.loss_bound(bandit(0, O=3), [20.0], 1e-3).holds


@pytest.mark.parametrize("make", FAMILIES.values())
def test_probabilities_and_scores_of_every_family(make):
    world = make(5)
    torch.testing.assert_close(world.pi_QO.sum(1), torch.ones(len(world.pi_QO), dtype=torch.float64))
    assert world.mean(world.score_QOD).abs().max() < 1e-13  # E s = 0
    fisher = exact.weighted_fisher(world, torch.ones_like(world.pi_QO))
    torch.testing.assert_close(world.mean(world.curvature_QODD), -fisher, rtol=1e-9, atol=1e-12)
    assert (world.rewards_QO.max(1).values > world.rewards_QO.min(1).values).all()
    if world.smoothness == world.smoothness:
        for shift in torch.linspace(-3, 3, 7):
            here = world.at(world.theta_D * shift)
            assert float(torch.linalg.eigvalsh(here.curvature_QODD).abs().max()) <= world.smoothness + 1e-12
            assert float(here.norm2_QO.max()) <= world.score_bound + 1e-12


def test_too_many_prompts_for_the_vocabulary():
    with pytest.raises(ValueError, match="4 prompts are too many"):
        transformer(Q=4)
