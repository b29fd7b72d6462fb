"""The length of steps, on objectives whose best step is known."""

import math
from dataclasses import asdict

import pytest
import torch

from oblrpo.estimators import SNRSchedule
from oblrpo.estimators.measured_rate import FIRST, LEAST, MEMORY, OUTLIER, Slope
from oblrpo.estimators.moments import inner, moments


def lengths(slope, curvature, P=16, steps=2000, seed=0, unit=1.0, outliers=()):
    """Of steps whose slopes are `slope` less `curvature` times their length, with noise of 1 a prompt.

    `outliers` are slopes in the place of these, by the number of their step.
    """
    random, seen, taken = torch.Generator().manual_seed(seed), Slope(), []
    for noise in torch.randn(steps, generator=random).tolist():
        taken.append(seen.length)
        found = dict(outliers).get(len(taken) - 1, slope - curvature * taken[-1] + noise / P**0.5)
        seen.observe(unit * found, taken[-1], P)
    return taken


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(("slope", "curvature"), [(0.3, 0.0), (0.3, 1.0), (0.3, 5.0), (1.0, 3.0)])
@pytest.mark.parametrize("P", [8, 32])
def test_steps_are_as_long_as_they_should_be(slope, curvature, P):
    """A / (C + s), but for what `BELIEF` keeps of the first length."""
    expected = (320 / 2 * slope + 48 * FIRST) / (320 / 2 * (1 + curvature) + 48)
    assert mean(lengths(slope, curvature, P)[200:]) == pytest.approx(expected, rel=0.12)


def test_the_unit_of_rewards_does_not_matter():
    assert lengths(0.3, 2.0, unit=1000.0, steps=50) == pytest.approx(lengths(0.3, 2.0, steps=50))


@pytest.mark.parametrize("P", [8, 32])
@pytest.mark.parametrize("sigmas", [1e3, -1e3, 1e6, -1e6])
def test_one_outlier_does_not_stall_a_run(sigmas, P):
    """However far off: no step that follows is half as long or half as long again, and fifty later it is forgotten."""
    for seed in range(20):
        without = lengths(0.3, 1.0, P, 82, seed)
        found = lengths(0.3, 1.0, P, 82, seed, outliers={30: sigmas / P**0.5})
        ratios = [one / other for one, other in zip(found, without, strict=True)]
        assert ratios[:31] == [1.0] * 31
        assert 0.5 < min(ratios) <= max(ratios) < 1.5
        assert ratios[-1] == pytest.approx(1, abs=0.15)


def measured_lengths(scale_T, seed):
    """The lengths of `auto` where J is straight and gradients are multiplied by these; Adam takes their signs alone."""
    random, taken = torch.Generator().manual_seed(seed), []
    theta = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([theta], lr=0.01, betas=(0.0, 0.0))
    schedule = SNRSchedule(optimizer, "auto")
    signs_SD = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    for scale in scale_T:
        noise_ND = 2 * torch.randn(16, 3, generator=random, dtype=torch.float64)
        g_ND = scale * (torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64) + noise_ND)
        theta.grad = -g_ND.mean(0)
        schedule.step(moments(g_ND.square().sum(1), g_ND.mean(0).square().sum()), mean_length=1.0)
        before = theta.detach().clone()
        optimizer.step()
        schedule.limit_step(lambda before=before: (signs_SD @ (theta.detach() - before))[:, None])
        taken.append(schedule.rule.slope.length)
    return taken


@pytest.mark.parametrize("decades", [-3, 3])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_shrink_or_grow_leave_lengths_as_they_are(decades, seed):
    """Squared, by a million in ten steps. While they do, a batch is divided by three times its size, or a third."""
    moves = [10 ** (decades * min(max(t - 20, 0), 10) / 10) for t in range(60)]
    stay, move = measured_lengths([1.0] * 60, seed), measured_lengths(moves, seed)
    assert move[:20] == stay[:20]
    ratios = [one / other for one, other in zip(move, stay, strict=True)]
    assert 0.8 < min(ratios) <= max(ratios) < 1.25


def test_noise_alone_makes_steps_short_and_no_more():
    """They wander over the shortest one, and do not go down for good."""
    taken = lengths(0.0, 1.0, steps=12_000)
    assert min(taken) == LEAST
    assert mean(taken[6000:]) < 0.3 * FIRST
    assert max(taken[6000:]) > 2 * LEAST


@pytest.mark.parametrize("batches", [1, 2, 5, 40])
def test_the_noise_of_one_prompt_is_estimated_without_bias(batches):
    """Its square, where there is no slope; standard errors are 0.012 to 0.02."""
    random, squares = torch.Generator().manual_seed(0), []
    for noises in torch.randn(15_000 if batches < 40 else 1000, batches, generator=random).tolist():
        seen = Slope()
        for noise in noises:
            seen.observe(noise / 16**0.5, 0.1, 16)
        squares.append(seen.noise**2)
    assert mean(squares) == pytest.approx(1.0, abs=0.05)


def test_nothing_is_known_at_first():
    assert Slope().length == pytest.approx(FIRST)


@pytest.mark.parametrize(("slope", "longer"), [(1.0, True), (-1.0, False)])
def test_without_any_noise_the_slope_alone_decides(slope, longer):
    """Not after two steps, which may be alike by chance."""
    seen, taken = Slope(), []
    for _ in range(60):
        seen.observe(slope, FIRST, 16)
        taken.append(seen.length)
    assert taken[1] < 2 * FIRST
    assert (taken[-1] > 5 * FIRST) if longer else (taken[-1] == LEAST)


def test_where_it_left_off():
    seen, again = Slope(), Slope()
    for slope in (1.0, 0.2, -0.4):
        seen.observe(slope, 0.1, 16)
    vars(again).update(asdict(seen))
    for each in (seen, again):
        each.observe(0.3, 0.2, 8)
    assert again.length == seen.length != FIRST


@pytest.mark.parametrize("curvature", [1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_gains_are_zero_at_theorem_4s_rate(curvature, noise):
    """A quadratic J of curvature c: E[g'd] = eta (S - eta c (S + T/N)), measured over many pairs of batches."""
    random = torch.Generator().manual_seed(0)
    gradient, D, M = torch.tensor([1.0, -0.5, 0.0]).double(), 3, 200_000
    S, T_over_N = float(gradient @ gradient), D * noise**2
    best = S / (S + T_over_N) / curvature
    for eta, sign in ((best / 2, 1), (best, 0), (2 * best, -1)):
        first, second = (gradient + noise * torch.randn(M, D, generator=random).double() for _ in range(2))
        update = eta * first
        gains = ((second - curvature * update) * update).sum(1)
        expected = eta * (S - eta * curvature * (S + T_over_N))
        assert float(gains.mean()) == pytest.approx(expected, abs=5 * float(gains.std()) / M**0.5 + 1e-12)
        assert (expected > 1e-12) - (expected < -1e-12) == sign


def test_inner_products_are_summed_in_float64():
    x, y = torch.randn(3, 5).bfloat16(), torch.randn(3, 5)
    assert inner([(x, y), (y, y)]) == pytest.approx(float((x.double() * y.double()).sum() + (y.double() ** 2).sum()))
    assert inner([]) == 0.0


def test_what_two_slopes_say_alike_does_not_bound_the_third_and_bounds_the_fourth():
    """At four times their root mean square of a prompt; the sums forget by exp(-1 / 40) a batch of 8 prompts."""
    found, keep = Slope(), math.exp(-8 / MEMORY)
    for slope in (1.0, 1.0, 9.0):
        found.observe(slope, 0.1, 8)
    assert found.gain == pytest.approx(8 * (keep**2 + keep + 9))
    bound = OUTLIER * max(found.noise / math.sqrt(8), found.gain / found.prompts)
    found.observe(1e6, 0.1, 8)
    assert found.gain == pytest.approx(8 * (keep * (keep**2 + keep + 9) + bound))
