"""A claim: what is said, what comes out, and the verdict, which is computed. A measurement: what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Relation = Literal["=", "<=", ">="]

Z = 4.0
"""Standard errors to each side of what was sampled: of thirty such rows one in 500 tables has one wrong by chance."""


@dataclass(frozen=True)
class Claim:
    """One statement about numbers.

    Args:
        result: what is stated.
        source: `paper`, `derived`, or a reference.
        claimed: what the statement says.
        computed: what came out.
        relation: how `computed` ought to stand to `claimed`.
        margin: half-width of `computed`'s interval (`Z` standard errors) where it was sampled, 0 where it is exact.
        tolerance: of `=`, relative to `claimed`.
        gap: of `=` between tensors: ||computed - claimed|| / ||claimed||, where the two numbers are their norms.
        note: where it was computed (up to the first colon), and more about it.
    """

    result: str
    source: str
    claimed: float
    computed: float
    relation: Relation = "="
    margin: float = 0.0
    tolerance: float = 1e-10
    gap: float | None = None
    note: str = ""

    @property
    def slack(self) -> float:
        """What is left before an inequality fails, negative where it does; for `=` the relative difference."""
        if self.relation != "=":
            return self.claimed - self.computed if self.relation == "<=" else self.computed - self.claimed
        if self.gap is not None:
            return self.gap
        difference = abs(self.computed - self.claimed)
        if not difference:
            return 0.0
        return difference / abs(self.claimed) if self.claimed else math.inf

    @property
    def room(self) -> float:
        """Slack as a share of what is claimed; for `=`, what tolerance and chance leave. Negative: it fails."""
        scale = abs(self.claimed) or 1.0
        allowed = max(self.tolerance, self.margin / scale)
        return allowed - self.slack if self.relation == "=" else self.slack / scale

    @property
    def holds(self) -> bool:
        """Whether the statement holds over the whole interval; NaN never holds."""
        if self.relation == "=":
            return self.room >= 0
        return self.slack - self.margin >= -self.tolerance * abs(self.claimed)

    @property
    def undecided(self) -> bool:
        """Whether the interval of an inequality lies on both sides of what is claimed."""
        return not self.holds and self.relation != "=" and self.slack + self.margin >= 0

    @property
    def where(self) -> str:
        """Where it was computed: the note up to its first colon."""
        return self.note.split(":")[0]

    @property
    def verdict(self) -> str:
        """The verdict in a word or three."""
        return "holds" if self.holds else "undecided" if self.undecided else "does not hold"

    def noted(self, note: str) -> Claim:
        """The same claim with another note."""
        return replace(self, note=note)


@dataclass(frozen=True)
class Measurement:
    """A number that nothing is claimed of."""

    what: str
    where: str
    value: float
    margin: float = 0.0
    note: str = ""


def same(result: str, source: str, claimed: Tensor, computed: Tensor, note: str) -> Claim:
    """Claim that two tensors are equal, on the scale of the claimed one's norm.

    gap = ||computed - claimed|| / ||claimed||.
    """
    scale, difference = float(claimed.norm()), float((computed - claimed).norm())
    gap = difference / scale if scale else math.inf if difference else 0.0
    return Claim(result, source, scale, float(computed.norm()), gap=gap, note=note)


def worst(claims: list[Claim]) -> Claim:
    """Of the claims of one statement in several places, the one with the least room."""
    least = min(claims, key=lambda claim: -math.inf if math.isnan(claim.room) else claim.room)
    return least.noted(f"worst of {len(claims)}, {least.note}")


def interval(values: Tensor) -> tuple[float, float]:
    """Mean of independent values and `Z` standard errors of it."""
    values = values.double()
    return float(values.mean()), Z * float(values.std()) / len(values) ** 0.5


def slope(x: Tensor, y: Tensor) -> float:
    """Slope of the least-squares line through points."""
    x = x - x.mean()
    return float((x @ y) / (x @ x))


def romberg(values: list[float]) -> float:
    """The limit of f(n) = limit + a/n + b/n^2 + ... from n, 2n, 4n, ...: Richardson's extrapolation, repeated.

    One value: itself. Each round takes away one power of 1/n.
    """
    row = torch.tensor(values, dtype=torch.float64)
    for order in range(1, len(values)):
        row = (2**order * row[1:] - row[:-1]) / (2**order - 1)
    return float(row[0])
