"""Means of few independent values, with intervals that are as wide as few values ask for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Measured(NamedTuple):
    """A mean, its standard error, and how many independent values that came from, less one."""

    value: float
    stderr: float
    freedom: int

    @property
    def margin(self) -> float:
        """Half-width of the 95 % interval, by Student's t."""
        return student(self.freedom) * self.stderr


def measured(values_B: Tensor, sizes_B: Tensor | None = None) -> Measured:
    """The mean of independent blocks' means, each weighed by its size (1 if None): sum n_b v_b / sum n_b.

    Its variance is B / (B - 1) sum n_b^2 (v_b - mean)^2 / (sum n_b)^2; the standard error of a plain mean where all are
    of one size.
    """
    values_B = values_B.double()
    share_B = torch.ones_like(values_B) if sizes_B is None else sizes_B.double()
    share_B = share_B / share_B.sum()
    mean, B = float(share_B @ values_B), len(values_B)
    variance = float((share_B * (values_B - mean)).square().sum()) * B / (B - 1)
    return Measured(mean, math.sqrt(variance), B - 1)


def student(freedom: int, chance: float = 0.95) -> float:
    """The t that |t| of Student's distribution does not exceed with this chance: by bisection of `central_chance`."""
    low, high = 0.0, 1.0
    while central_chance(high, freedom) < chance:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if central_chance(middle, freedom) < chance else (low, middle)
    return high


def central_chance(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's distribution, a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).

    With phi = atan(t / sqrt(nu)): for odd nu (2/pi) (phi + sin phi (cos phi + 2/3 cos^3 phi + 2 4/(3 5) cos^5 phi
    ...)), for even sin phi (1 + 1/2 cos^2 phi + 1 3/(2 4) cos^4 phi ...), the last power nu - 2.
    """
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
