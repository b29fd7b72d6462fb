"""The theorems on random policies: no counterexample to what is true, one soon found to what is not."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lab.theory import descent, exact, identities, leave_one_out, smoothness, theorems
from lab.theory.descent import Quadratic, SampledWorld
from lab.theory.worlds import FAMILIES, bandit, linear_bandit, transformer, tree

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def worlds(draw):
    """Small ones of every tabular family; the transformer is too large for groups of three."""
    seed, Q = draw(st.integers(0, 10**6)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["bandit", "linear bandit", "token tree"]))
    if kind == "token tree":
        return tree(seed, Q, length=draw(st.integers(1, 2)))
    world = FAMILIES[kind](seed, Q, O=draw(st.integers(2, 4)), scale=draw(st.sampled_from([0.1, 1.0, 3.0])))
    assume(float(world.pi_QO.min()) > 1e-4)  # nearer to certainty float64 keeps no ten digits of a score
    return world


def shifted(world):
    noise_QO = torch.sin(torch.arange(world.logp_QO.numel())).view_as(world.logp_QO)
    return (world.logp_QO + 0.3 * noise_QO).softmax(1)


@few
@given(worlds(), st.integers(2, 3), st.sampled_from(["none", "rloo", "oblr"]), st.booleans())
def test_unbiased_baselines_are(world, G, name, off_policy):
    assume(float(world.gradient_D.norm()) > 1e-3)
    assert theorems.unbiased(world, name, G, shifted(world) if off_policy else None).holds


@few
@given(worlds(), st.integers(1, 3), st.floats(-3, 3))
def test_covariances_are_those_of_the_formulas(world, G, baseline):
    fixed_Q = torch.full((len(world.rewards_QO),), baseline, dtype=torch.float64)
    assert theorems.fixed_baseline_covariance(world, G, fixed_Q).holds
    if G > 1:
        assert theorems.rloo_covariance(world, G).holds
        assert all(claim.holds for claim in theorems.group_mean_is_scaled_rloo(world, G))
        assert identities.leverage(world, G).holds
        assert identities.leverage(world, G, shifted(world)).holds


@few
@given(worlds(), st.floats(-2, 2))
def test_no_fixed_baseline_is_quieter_than_the_optimal_one(world, other):
    best = exact.fixed_baseline_moments(world, exact.optimal_baseline(world), 2).trace
    another = exact.fixed_baseline_moments(world, exact.optimal_baseline(world) + other, 2).trace
    assert best <= another + 1e-12 * max(abs(another), 1e-3)  # both are 0 but for rounding where rewards do not vary
    assume(float(exact.optimal_baseline(world).norm()) > 1e-3)
    assert theorems.optimal_baseline(world).holds
    assert theorems.optimal_baseline(world, 1, shifted(world)).holds


@few
@given(worlds(), st.floats(0.01, 1.5), st.integers(1, 2), st.floats(-1, 1))
def test_the_loss_bound_and_the_derived_constant(world, rate, N, baseline):
    assume(world.rewards_QO.numel() <= 6)
    landscape = SampledWorld(world, N, 1, exact.fixed(baseline), "")
    c = smoothness.everywhere(world)["osc(F) L"]
    assert descent.loss_bound(landscape, [rate, rate / 2], c, "").holds
    assert descent.total_decrease(landscape, 2, c).holds
    assert all(claim.holds for claim in smoothness.bounds_hold(world, 2))
    assert all(claim.holds for claim in smoothness.bounds_hold_at_every_place(world, 2))
    assert smoothness.kl_bound(world, shifted(world), rate).holds


@few
@given(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.01, 1), st.integers(1, 3))
def test_equalities_of_any_quadratic(c, sigma, rate, N):
    quadratic = Quadratic(torch.tensor([0.9, -0.3], dtype=torch.float64), c, sigma, N)
    assert descent.loss_bound(quadratic, [rate, rate / 2], c, "").slack < 1e-9
    assert descent.total_decrease(quadratic, 2, c).slack < 1e-9
    assert descent.decay_bound_is_attained(quadratic).slack < 1e-9


@few
@given(worlds(), st.integers(1, 64), st.floats(0.1, 10))
def test_the_best_rate(world, N, c):
    assume(float(world.gradient_D.norm()) > 1e-3)
    assert descent.best_rate(world, N, 2, c).holds
    assert descent.schedule_uses_it(world, N, 2).holds
    assert descent.noise_scale(world, N, 2, c).holds


@few
@given(st.integers(0, 10**6), st.sampled_from(["bandit", "linear bandit"]))
def test_expansions_in_the_size_of_the_group(seed, kind):
    """Where the weights' spread is small and no output rare in the groups, as the expansion in 1/G needs."""
    world = FAMILIES[kind](seed, Q=1, O=3)
    assume(identities.spread(world) < 3)
    assume(float(world.pi_QO.min()) > 0.05)
    assume(float(identities.limit_of_bias(world).norm()) > 1e-3 * float(world.gradient_D.norm()))
    assert identities.in_sample_is_biased(world).holds
    prompt = leave_one_out.Prompt.of(world)
    assume(abs(leave_one_out.second_coefficient(prompt)) > 0.1 * float(prompt.weight))
    assume(float(prompt.covariance.square() / prompt.weight) > 1e-2 * float(prompt.weight))
    assert all(claim.holds for claim in leave_one_out.coefficients(world, rounds=3))


@few
@given(st.floats(1e-4, 0.1))
def test_the_papers_constant_fails_exactly_where_it_should(rewards):
    """B E|s^2 - v| > B L + B^2 M: for B below (E|s^2 - v| - L) / M = 0.0266, and L and M hold everywhere."""
    derived, direct, papers = smoothness.small_rewards_break_the_papers_constant(rewards)
    assert derived.holds
    assert direct.holds
    p = torch.sigmoid(torch.tensor([1.25, -1.25], dtype=torch.float64))
    v, ones = (p * (1 - p)).sum(), p.sum()
    chance = torch.stack([(1 - p).prod(), p[0] * (1 - p[1]), p[1] * (1 - p[0]), p.prod()])
    score = torch.tensor([0.0, 1, 1, 2], dtype=torch.float64) - ones
    edge = float(chance @ (score.square() - v).abs() - v) / 4
    assert edge == pytest.approx(0.0266, abs=1e-4)
    assume(abs(rewards - edge) > 1e-9)
    assert papers.holds == (rewards > edge)


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
    landscape = SampledWorld(bandit(0, O=3), 1, 1, exact.fixed(0.0), "")
    assert not descent.loss_bound(landscape, [20.0], 1e-3, "").holds


@pytest.mark.parametrize("name", FAMILIES)
def test_probabilities_and_scores_of_every_family(name):
    world = FAMILIES[name](5, **({"Q": 1, "length": 2} if name == "transformer" else {}))
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
