"""Verdicts are computed: they can be any of three, and they look at what is compared, not at how large it is."""

import math

import pytest
import torch

from lab.theory.claims import Claim, Z, interval, romberg, same, slope, worst

NAN = float("nan")


@pytest.mark.parametrize(
    ("relation", "claimed", "computed", "margin", "verdict"),
    [
        ("=", 0.0, 0.0, 0, "holds"), ("=", 0.0, 1e-300, 0, "does not hold"),
        ("=", 1e-9, 1.1e-9, 0, "does not hold"), ("=", 1e-9, 1e-9 + 1e-20, 0, "holds"),
        ("=", 1e6, 1e6 + 1e-5, 0, "holds"), ("=", 1e6, 1e6 + 1e-3, 0, "does not hold"),
        ("=", 1.0, NAN, 0, "does not hold"),
        ("=", 1.0, 1.1, 0.2, "holds"), ("=", 1.0, 1.3, 0.2, "does not hold"), ("=", -2.0, -2.3, 0.2, "does not hold"),
        ("<=", 1.0, 0.9, 0, "holds"), ("<=", 1.0, 1.0, 0, "holds"), ("<=", 1.0, 1.01, 0, "does not hold"),
        ("<=", 1e-6, 1.01e-6, 0, "does not hold"), ("<=", 1.0, NAN, 0, "does not hold"),
        ("<=", 1.0, 0.9, 0.2, "undecided"), ("<=", 1.0, 1.1, 0.2, "undecided"), ("<=", 1.0, 1.3, 0.2, "does not hold"),
        ("<=", 1.0, 0.7, 0.2, "holds"),
        (">=", 1.0, 1.1, 0, "holds"), (">=", 1.0, 0.99, 0, "does not hold"), (">=", 0.0, -1e-9, 0, "does not hold"),
        (">=", 1.0, 1.1, 0.2, "undecided"), (">=", 1.0, 0.7, 0.2, "does not hold"),
    ],
)  # fmt: skip
def test_verdicts(relation, claimed, computed, margin, verdict):
    claim = Claim("", "", claimed, computed, relation, margin=margin)
    assert claim.verdict == verdict
    assert claim.holds == (verdict == "holds")


def test_a_looser_tolerance_is_relative_too():
    assert Claim("", "", 100.0, 100.9, tolerance=1e-2).holds
    assert not Claim("", "", 100.0, 101.1, tolerance=1e-2).holds


def test_tensors_are_compared_on_their_own_scale():
    a = torch.tensor([3e-8, 4e-8], dtype=torch.float64)
    claim = same("", "", a, a.flip(0), "x: y")
    assert (claim.claimed, claim.computed) == pytest.approx((5e-8, 5e-8))  # equal norms are not enough
    assert claim.gap == pytest.approx(2**0.5 / 5)
    assert not claim.holds
    assert same("", "", a, a * (1 + 1e-12), "").holds
    assert same("", "", 0 * a, 0 * a, "").holds
    assert not same("", "", 0 * a, a, "").holds
    assert not same("", "", a, a * NAN, "").holds
    assert claim.where == "x"


def test_the_worst_claim_is_the_one_with_the_least_room():
    equal = [Claim("", "", 1.0, 1 + gap) for gap in (1e-12, 1e-3, 1e-16)]
    assert worst(equal).computed == 1 + 1e-3
    bounds = [Claim("", "", 1.0, value, "<=") for value in (0.5, 1.2, 0.9)]
    assert worst(bounds).computed == 1.2
    scales = [Claim("", "", 1e-3, 2e-3, "<="), Claim("", "", 1e3, 1e3 - 0.1, "<=")]
    assert worst(scales).claimed == 1e-3
    assert not worst([*bounds[::2], Claim("", "", 1.0, NAN, "<=")]).holds
    chance = [Claim("", "", 1.0, 1.1, margin=0.2), Claim("", "", 1.0, 1.01, margin=0.001)]
    assert worst(chance).computed == 1.01


def test_intervals_of_means_cover_them():
    found = [interval(torch.randn(50, generator=torch.Generator().manual_seed(seed))) for seed in range(300)]
    means, margins = torch.tensor(found, dtype=torch.float64).T
    assert float(margins.mean()) == pytest.approx(Z / 50**0.5, rel=0.02)
    assert (means.abs() > margins).sum() <= 1


def test_slope_and_extrapolation():
    x = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert slope(x, 3 - 2 * x) == pytest.approx(-2)
    assert slope(x, torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)) == pytest.approx(8 / 13)
    values = [7 + 3 / n - 5 / n**2 + 11 / n**3 for n in (2, 4, 8, 16)]
    assert romberg(values) == pytest.approx(7, abs=1e-12)
    assert romberg(values[:1]) == values[0]
    assert math.isnan(romberg([1.0, NAN]))
