"""The figures avg@k, pass@k and maj@k of n graded completions a problem, with 95 % intervals over problems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from oblrpo.errors import InputError
from oblrpo.intervals import Z95


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its uncertainty."""

    value: float
    """The mean; NaN of nothing."""
    stderr: float = math.nan
    """The standard error over problems, since the completions of one problem are not independent."""
    interval: tuple[float, float] | None = None
    """The 95 % interval; none for a single problem."""

    def as_json(self) -> dict[str, Any]:
        """Return value and interval as results hold them."""
        return {"value": self.value, "interval": list(self.interval) if self.interval else None}


def clustered(values_P: Sequence[float], least: float = 0.0, most: float = 1.0) -> Estimate:
    """Return the mean over problems +- 1.96 s / sqrt(P), s the standard deviation over problems.

    The interval is cut to [least, most]. Each problem gives one value: its completions are dependent, and problems are
    what was drawn.
    """
    P = len(values_P)
    mean = math.fsum(values_P) / P if P else math.nan
    if P < 2:
        return Estimate(mean)
    variance = sum((value - mean) * (value - mean) for value in values_P) / (P - 1)
    stderr = math.sqrt(variance) / math.sqrt(P)
    return Estimate(mean, stderr, (max(least, mean - Z95 * stderr), min(most, mean + Z95 * stderr)))


def pass_at(k: int, correct: int, n: int) -> float:
    """Return the chance that k of the n completions, drawn without replacement, hold a right one.

    With c right ones this is 1 - C(n - c, k) / C(n, k), unbiased for pass@k (Chen et al. 2021, arXiv:2107.03374).
    """
    return float(1 - Fraction(math.comb(n - correct, k), math.comb(n, k)))


def majority_at(k: int, right: int, others: Sequence[int], silent: int = 0) -> float:
    """Return the exact chance that the most frequent answer of k completions, drawn without replacement, is right.

    `right` completions give the right answer, `others[i]` the i-th wrong one, `silent` none at all (no vote).
    A tie of t answers counts 1 / t, as if one of them were drawn. The draws in which the right answer has r votes and
    t others have as many are C(right, r) times the coefficient of x^(k-r) y^t in
    prod_i (sum_{a<r} C(n_i, a) x^a + C(n_i, r) x^r y) * (1 + x)^silent.
    """
    n = right + sum(others) + silent
    won = Fraction(0)
    for r in range(1, min(right, k) + 1):
        draws = {(0, 0): 1}  # (completions drawn, answers tied) -> ways
        for size in others:
            draws = _with_answer(draws, size, r, k - r)
        for (drawn, tied), ways in draws.items():
            won += Fraction(math.comb(right, r) * ways * math.comb(silent, k - r - drawn), 1 + tied)
    return float(won / math.comb(n, k))


def _with_answer(draws: dict[tuple[int, int], int], size: int, most: int, room: int) -> dict[tuple[int, int], int]:
    """Return the ways after one more wrong answer, which has at most `most` votes."""
    result: dict[tuple[int, int], int] = {}
    for (drawn, tied), ways in draws.items():
        for votes in range(min(size, most, room - drawn) + 1):
            place = (drawn + votes, tied + (votes == most))
            result[place] = result.get(place, 0) + ways * math.comb(size, votes)
    return result


def sizes(ks: Sequence[int], n: int) -> list[int]:
    """Return the sizes of draws from n completions: those that are given, in order, or 1, 2, 4, ... and n."""
    for k in ks:
        if not 1 <= k <= n:
            raise InputError(f"k is {k}; with {n} completions a problem it must be from 1 to {n}.")
    return sorted(set(ks) or {1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})
