"""A condition: one row of the table of what can go wrong in a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from oblrpo.diagnosis.course import STALLED, Course, Mean

SURE = 4.5
"""How many standard errors a statistic must lie from what a healthy run shows, where a condition does not say. The
highest of many windows is the luckiest of them, and a run is looked at after every step."""


class Reading(NamedTuple):
    """What a statistic shows at a step: the greater, the worse."""

    value: float
    stderr: float
    """Its standard error; 0 where it is counted and not estimated."""
    since: int
    """The first step of the window that shows it."""
    words: dict[str, Any]
    """What the sentence says beside `value`."""


TOO_LONG = "Updates are too large: {shorten}, and restart from the beginning or an earlier checkpoint."
"""A cure of several conditions."""


def log_ratio(above: Mean, below: Mean, now: Mean) -> Reading:
    """log(above / below) of two means of a metric, one of them that of now, with its error to first order."""
    ratio = math.log(max(above.value, TINY) / max(below.value, TINY))
    noise = math.hypot(*(mean.stderr / mean.value for mean in (above, below) if mean.value > TINY))
    then = below if now is above else above
    return Reading(ratio, min(noise, 1.0), now.first, {"now": now.value, "then": then.value, "step": then.last})


TINY = 1e-12


def changed(run: Course, key: str, factor: float, enough: float = math.inf) -> Reading | None:
    """How far a metric has gone from where it was `factor` times as large, with no rise of the reward since.

    A change by the ratio `enough` counts whatever the reward does.
    """
    now = run.now(key)
    then = run.last_beyond(key, now, factor) if now else None
    if now is None or then is None or not then.value > 0:
        return None
    above, below = (then, now) if factor > 1 else (now, then)
    if above.value < enough * max(below.value, TINY) and run.reward_since(then.last) >= STALLED:
        return None
    return log_ratio(above, below, now)


@dataclass(frozen=True, eq=False)
class Condition:
    """Something that is wrong with a run: a statistic with its noise, and a threshold."""

    statistic: Callable[[Course], Reading | None]
    """None where nothing can be said at this step."""
    columns: tuple[str, ...]
    """The metrics that it needs."""
    threshold: float
    """The statistic from which on the condition holds."""
    healthy: float
    """What the statistic of a healthy run does not exceed but by its noise."""
    sentence: str
    cure: str
    wrong: bool
    """False: it is a note, and nothing is wrong."""
    sure: float
    """How many standard errors a reading must lie above what a healthy run shows."""
    updated: bool
    """Its finding is updated after every step; its words say when it was `found`, and `until` when it held."""
    rows: bool
    """It looks at rows one by one, and must see each: windows of long runs are not looked at after every row."""
    turns: frozenset[str]
    """What its cure turns, and in which direction: "-learning_rate"."""

    @cached_property
    def name(self) -> str:
        """Its name, in words."""
        return self.statistic.__name__.replace("_", " ").replace("kl ", "KL ")

    @property
    def about(self) -> str:
        """What it is, and what it looks like."""
        return " ".join((self.statistic.__doc__ or "").split())

    def opposes(self, other: Condition) -> bool:
        """Whether the cure of another turns back what its own turns."""
        return any(f"{'+-'[way.startswith('+')]}{way[1:]}" in other.turns for way in self.turns)

    def sureness(self, reading: Reading) -> float:
        """How many standard errors a reading lies above what a healthy run shows; infinite where it has no noise."""
        excess = reading.value - self.healthy
        return excess / reading.stderr if reading.stderr else math.inf if excess > 0 else 0.0

    def holds(self, reading: Reading) -> bool:
        """Whether a reading reaches the threshold, and not by chance."""
        return reading.value >= self.threshold and self.sureness(reading) >= self.sure


def condition(
    *columns: str,
    threshold: float,
    sentence: str,
    cure: str,
    healthy: float = 0.0,
    wrong: bool = True,
    sure: float = SURE,
    updated: bool = False,
    rows: bool = False,
    turns: str = "",
) -> Callable[[Callable[[Course], Reading | None]], Condition]:
    """Make a condition of a statistic; its name and docstring are those of the function."""
    last = wrong, sure, updated, rows, frozenset(turns.split())
    return lambda statistic: Condition(statistic, columns, threshold, healthy, sentence, cure, *last)
