"""Both ends of a spectrum from products alone, where power iteration gave anything between them."""

import pytest
import torch

from lab.probe.lanczos import inner, lanczos


def found_of(eigenvalues, iterations, seed=0):
    e = torch.tensor(eigenvalues)
    start = [torch.randn(len(e), generator=torch.Generator().manual_seed(seed)).to(e)]
    return lanczos(lambda v: [e * v[0]], start, iterations)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("eigenvalues", "iterations", "close"),
    [
        ([1.0, -1.0, 0.1], 3, 1e-5),
        ([1.0, -0.97, *[0.1] * 20], 12, 1e-5),
        ([-1.0, 0.97, *[0.1] * 20], 12, 1e-5),
        ([*torch.linspace(-1, 1, 50, dtype=torch.float64).tolist()], 40, 1e-3),
    ],
)
def test_both_ends(eigenvalues, iterations, close, seed):
    found = found_of(eigenvalues, iterations, seed)
    assert found.lowest == pytest.approx(min(eigenvalues), abs=close)
    assert found.highest == pytest.approx(max(eigenvalues), abs=close)
    assert abs(found.value) == pytest.approx(1.0, abs=close)


def test_an_outlier_of_a_wide_bulk_and_what_is_known_of_it():
    """20,000 values N(0, 0.2) and a 1.0, twelve products in float32: both ends lie within; the residual is honest."""
    bulk = 0.2 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    bulk[0] = 1.0
    for seed in range(5):
        found = found_of(bulk.tolist(), 12, seed)
        assert float(bulk.min()) - 1e-5 <= found.lowest <= -0.5
        assert 0.6 <= found.highest <= 1 + 1e-5
        assert float((bulk - found.value).abs().min()) <= found.residual + 1e-5
    far = found_of(bulk.tolist(), 60)
    assert far.highest == pytest.approx(1.0, abs=1e-4)
    assert far.residual < 1e-2


@pytest.mark.parametrize("top", [100.0, 1e4])
def test_directions_stay_apart_in_float32(top):
    """One eigenvalue far above the rest is found in a few products; from then on rounding would bring it back."""
    found = found_of([top, *torch.linspace(-1, 1, 300).tolist()], 60)
    assert inner(found.direction, found.direction) == pytest.approx(1, abs=1e-5)
    assert found.highest == pytest.approx(top, rel=1e-6)
    assert found.lowest == pytest.approx(-1, abs=1e-4)


@pytest.mark.parametrize("iterations", [1, 2, 5, 9, 30])
def test_value_and_residual_are_those_of_the_direction(iterations):
    """Of the direction returned, not of the one before it; a whole matrix, in two parts."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(9, 9, generator=generator, dtype=torch.float64)
    matrix = (matrix + matrix.T) / 2

    def times(v):
        flat = matrix @ torch.cat([v[0].flatten(), v[1]])
        return [flat[:6].view(2, 3), flat[6:]]

    start = [torch.randn(2, 3, generator=generator).double(), torch.randn(3, generator=generator).double()]
    found = lanczos(times, start, iterations)
    product = times(found.direction)
    assert inner(found.direction, found.direction) == pytest.approx(1.0)
    assert inner(found.direction, product) == pytest.approx(found.value)
    rest = [p - found.value * d for p, d in zip(product, found.direction, strict=True)]
    assert inner(rest, rest) ** 0.5 == pytest.approx(found.residual, abs=1e-7)
    assert found.value in {found.lowest, found.highest}
    if iterations >= 9:
        ends = torch.linalg.eigvalsh(matrix)
        assert (found.lowest, found.highest) == pytest.approx((float(ends[0]), float(ends[-1])))


def test_an_operator_that_is_nothing():
    found = found_of([0.0, 0.0], 4)
    assert (found.lowest, found.highest, found.value, found.residual) == (0, 0, 0, 0)
