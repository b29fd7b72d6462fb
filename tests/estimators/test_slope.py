"""The length of steps, on objectives whose best step is known."""

import pytest
import torch

from oblrpo.estimators.moments import inner
from oblrpo.estimators.slope import FIRST, LEAST, Slope


def lengths(slope, curvature, P=16, steps=2000, seed=0, unit=1.0):
    """Of steps whose slopes are `slope` less `curvature` times their length, with noise of 1 a prompt."""
    random, seen, taken = torch.Generator().manual_seed(seed), Slope(), []
    for noise in torch.randn(steps, generator=random).tolist():
        taken.append(seen.length)
        seen.observe(unit * (slope - curvature * taken[-1] + noise / P**0.5), taken[-1], P)
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
    again.load_state_dict(seen.state_dict())
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
