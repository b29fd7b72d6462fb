"""A claim: what is said, what comes out, and the verdict, which is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Relation = Literal["=", "<=", ">="]


@dataclass(frozen=True)
class Claim:
    """One statement about numbers.

    Args:
        result: what is stated.
        source: `paper`, `derived`, or a reference.
        claimed: what the statement says.
        computed: what came out.
        relation: how `computed` ought to stand to `claimed`.
        tolerance: of `=`, on the scale of `claimed` (or 1 if that is less).
        note: where it was computed, or the counterexample.
    """

    result: str
    source: str
    claimed: float
    computed: float
    relation: Relation = "="
    tolerance: float = 1e-10
    note: str = ""

    @property
    def slack(self) -> float:
        """What is left before the statement fails; negative where it does. Of `=`: the difference itself."""
        if self.relation == "=":
            return abs(self.computed - self.claimed) / max(1.0, abs(self.claimed))
        return self.claimed - self.computed if self.relation == "<=" else self.computed - self.claimed

    @property
    def holds(self) -> bool:
        """Whether it does, NaN never."""
        if math.isnan(self.slack):
            return False
        return self.slack <= self.tolerance if self.relation == "=" else self.slack >= -self._rounding

    @property
    def _rounding(self) -> float:
        return 1e-10 * max(1.0, abs(self.claimed))

    @property
    def where(self) -> str:
        """The note up to its first colon."""
        return self.note.split(":")[0]

    @property
    def verdict(self) -> str:
        """In a word or three."""
        return "holds" if self.holds else "does not hold"

    def noted(self, note: str) -> Claim:
        """The same with a note."""
        return replace(self, note=note)


def worst(claims: list[Claim]) -> Claim:
    """Of one statement tried in several places: the one with the least slack (of `=`: the largest difference)."""
    sign = -1 if claims[0].relation == "=" else 1
    least = min(claims, key=lambda claim: -math.inf if math.isnan(claim.slack) else sign * claim.slack)
    return least.noted(f"worst of {len(claims)}, {least.note}")
