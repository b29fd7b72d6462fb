"""Intervals of few values: Student's t against its tables, standard errors against the spread of repetitions."""

import pytest
import torch

from oblrpo.research.probe.intervals import Measured, central_chance, measured, student


@pytest.mark.parametrize(
    ("freedom", "t"),
    [
        (1, 12.70620), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462), (15, 2.13145), (127, 1.97882),
        (1000, 1.96234),
    ],
)  # fmt: skip
def test_student(freedom, t):
    assert student(freedom) == pytest.approx(t, abs=2e-5)
    assert central_chance(t, freedom) == pytest.approx(0.95, abs=1e-6)


def test_student_at_another_chance():
    assert student(5, 0.99) == pytest.approx(4.03214, abs=2e-5)
    assert student(6, 0.5) == pytest.approx(0.71756, abs=2e-5)


def test_a_plain_mean():
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    found = measured(values)
    assert found == pytest.approx((4.0, float(values.std()) / 2, 3))
    assert found.margin == pytest.approx(3.18245 * float(values.std()) / 2, rel=1e-5)


def test_blocks_of_unequal_size_are_as_sure_as_they_say():
    """Means of 1, 2 and 5 values, many times: their mean squared standard error is the variance of the mean."""
    generator = torch.Generator().manual_seed(0)
    sizes, found = torch.tensor([5, 4, 5, 4, 5, 4]), []
    for _ in range(4000):
        blocks = [torch.randn(int(n), generator=generator).mean() for n in sizes]
        found.append(measured(torch.stack(blocks), sizes)[:2])
    means, errors = torch.tensor(found, dtype=torch.float64).T
    assert float(means.var()) == pytest.approx(1 / 27, rel=0.08)
    assert float(errors.square().mean()) == pytest.approx(1 / 27, rel=0.08)


def test_the_margin_of_a_certain_value():
    assert Measured(1.0, 0.0, 3).margin == 0
