"""avg@k, pass@k and maj@k against closed forms and enumeration; intervals against their promise."""

import random
from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblrpo.errors import InputError
from oblrpo.evaluation.evaluate import clustered, majority_at, pass_at, sizes


@given(st.integers(1, 9), st.data())
@settings(deadline=None)
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at(k, c, n) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_is_unbiased():
    """Over binomial counts its mean is 1 - (1 - p)^k."""
    p, n, k = Fraction(3, 10), 8, 3
    mean = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(pass_at(k, c, n)) for c in range(n + 1))
    assert float(mean) == pytest.approx(float(1 - (1 - p) ** k), abs=1e-14)


def test_pass_at_k_of_many():
    assert pass_at(1, 300, 1000) == pytest.approx(0.3)
    assert pass_at(1000, 1, 1000) == 1.0
    assert 0 < pass_at(512, 1, 1024) < 1


def majority_by_enumeration(k, right, others, silent):
    answers = [0] * right + [i + 1 for i, size in enumerate(others) for _ in range(size)] + [None] * silent
    won = []
    for draw in combinations(answers, k):
        counts = Counter(answer for answer in draw if answer is not None)
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most]
        won.append(Fraction(int(0 in winners), max(1, len(winners))))
    return sum(won) / len(won)


@given(st.integers(0, 4), st.lists(st.integers(1, 3), max_size=3), st.integers(0, 2), st.data())
@settings(deadline=None, max_examples=150)
def test_majority_is_the_share_of_draws(right, others, silent, data):
    n = right + sum(others) + silent
    if n == 0:
        return
    k = data.draw(st.integers(1, n))
    exact = float(majority_by_enumeration(k, right, others, silent))
    assert majority_at(k, right, others, silent) == pytest.approx(exact, abs=1e-12)


def test_majority_by_hand():
    assert majority_at(4, 2, [2]) == 0.5
    assert majority_at(4, 2, [1, 1]) == 1.0
    assert majority_at(6, 2, [2, 2]) == pytest.approx(1 / 3)
    assert majority_at(3, 1, [], 2) == 1.0
    assert majority_at(3, 0, [1], 2) == 0.0
    assert majority_at(64, 33, [31]) == 1.0
    assert majority_at(1, 3, [5], 2) == pytest.approx(0.3)


def test_intervals_cover():
    """Beta-distributed difficulty, binomial completions: in about 95 % of runs the interval holds the true mean."""
    rng = random.Random(0)
    runs, P, n = 2000, 100, 4
    held = {"avg": 0, "pass": 0}
    for _ in range(runs):
        correct = [sum(rng.random() < p for _ in range(n)) for p in (rng.betavariate(1, 2) for _ in range(P))]
        low, high = clustered([c / n for c in correct]).interval
        held["avg"] += low <= 1 / 3 <= high
        low, high = clustered([pass_at(2, c, n) for c in correct]).interval
        held["pass"] += low <= 1 - 0.5 <= high  # E (1-p)^2 = 1/2 for Beta(1, 2)
    # 95 % of 2000 has a standard deviation of half a percent; the normal interval of 100 problems is a bit short.
    assert 0.93 < held["avg"] / runs < 0.97
    assert 0.93 < held["pass"] / runs < 0.97


def test_problems_are_the_unit():
    """Completions that always agree within a problem add nothing: the interval is that of one completion each."""
    one = clustered([1.0, 0.0, 1.0, 0.0])
    assert one.value == 0.5
    half = 1.959963984540054 * (1 / 3) ** 0.5 / 2
    assert one.interval == pytest.approx((max(0, 0.5 - half), min(1, 0.5 + half)))
    assert clustered([1.0]).interval is None
    assert clustered([1.0, 1.0]).interval == (1.0, 1.0)


def test_sizes():
    assert [sizes((), n) for n in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]
    assert sizes((3, 1, 3), 4) == [1, 3]
    for k in (0, 5):
        with pytest.raises(InputError, match=f"k is {k}; with 4 completions a problem it must be from 1 to 4"):
            sizes([k], 4)
