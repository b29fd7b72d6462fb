"""Means of blocks of unequal size; plain means and Student's t are tested in compare/test_statistics.py."""

import random
import statistics

import pytest

from lab.probe.curvature import mean_of_blocks
from oblrpo.intervals import mean, student_t


def test_blocks_of_one_size_are_plain_values():
    values = [1.0, 2.0, 4.0, 9.0]
    assert mean_of_blocks(values, [7, 7, 7, 7]) == mean(values)
    assert mean(values).margin == pytest.approx(3.18245 * statistics.stdev(values) / 2, rel=1e-5)


def test_blocks_of_unequal_size_by_hand():
    """Shares 3/4 and 1/4 of 2 and 6: mean 3; 2 (3/4 (2 - 3)) = -1.5 and 2 (1/4 (6 - 3)) = 1.5 have s = 1.5 sqrt(2)."""
    found = mean_of_blocks([2.0, 6.0], [3, 1])
    assert (found.value, found.n) == (3.0, 2)
    assert found.margin == pytest.approx(12.70620 * 1.5, rel=1e-6)


def test_blocks_of_unequal_size_are_as_sure_as_they_say():
    """Means of 1, 4 and 5 normal values, many times: their mean squared error is the variance of the mean, 1 / 20."""
    rng, sizes = random.Random(0), [5, 1, 4, 5, 1, 4]
    found = [mean_of_blocks([rng.gauss(0, size**-0.5) for size in sizes], sizes) for _ in range(4000)]
    assert statistics.variance(each.value for each in found) == pytest.approx(1 / 20, rel=0.08)
    errors = [each.margin / student_t(5) for each in found]
    assert statistics.fmean(error**2 for error in errors) == pytest.approx(1 / 20, rel=0.08)
