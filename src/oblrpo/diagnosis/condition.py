"""A condition: one row of the table of what can go wrong in a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Set
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from oblrpo.diagnosis.course import STALLED, Course, Mean

TINY = 1e-12
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


@dataclass(frozen=True, eq=False)
class Condition:
    """Something that is wrong with a run: a statistic with its noise, and a threshold."""

    name: str
    statistic: Callable[[Course], Reading | None]
    """None where nothing can be said at this step."""
    columns: tuple[str, ...]
    """The metrics that it needs."""
    threshold: float
    """The statistic from which on the condition holds."""
    _: KW_ONLY
    sentence: str
    cure: str
    description: str = ""
    """What it is and looks like, where several conditions share a statistic; else the statistic's docstring says so."""
    turns: Set[str] = frozenset()
    """What its cure turns, and in which direction: "-learning_rate"."""
    brings: Set[str] = frozenset()
    """What it may bring along: a cause is reported with its cure, and these beneath it without one."""
    healthy: float = 0.0
    """What the statistic of a healthy run does not exceed but by its noise."""
    sure: float = SURE
    """How many standard errors a reading must lie above what a healthy run shows."""
    wrong: bool = True
    """False: it is a note, and nothing is wrong."""
    updated: bool = False
    """Its finding is updated after every step; its words say when it was `found`, and `until` when it was last seen."""
    rows: bool = False
    """It looks at rows one by one, and must see each: windows of long runs are not looked at after every row."""
    collapse: bool = False
    """A run with `stop_on_collapse` ends where it holds."""

    @property
    def about(self) -> str:
        """What it is, and what it looks like."""
        return self.description or " ".join((self.statistic.__doc__ or "").split())

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


def mean(run: Course, key: str) -> Reading | None:
    """The mean of a metric over the last window."""
    now = run.now(key)
    return Reading(now.value, now.stderr, now.first, {}) if now else None


def log_ratio(above: Mean, below: Mean, now: Mean) -> Reading:
    """log(above / below) of two means of a metric, one of them that of now, with its error to first order."""
    ratio = math.log(max(above.value, TINY) / max(below.value, TINY))
    noise = math.hypot(*(each.stderr / each.value for each in (above, below) if each.value > TINY))
    then = below if now is above else above
    return Reading(ratio, min(noise, 1.0), now.first, {"now": now.value, "then": then.value, "step": then.last})


def changed(
    run: Course, key: str, factor: float, least: float = -math.inf, by: float = -math.inf, median: bool = False,
    enough: float = math.inf, enough_times: float = math.inf,
) -> Reading | None:  # fmt: skip
    """How far a metric has gone from where it was `factor` times as large, with no rise of the reward since.

    It is `least` now, and differs `by` so much; with `median`, that of the single rows has changed as much. From the
    mean `enough` on, or a change by the ratio `enough_times`, it counts whatever the reward does.
    """
    now = run.now(key)
    then = run.last_beyond(key, now, factor) if now and now.value >= least else None
    if now is None or then is None or not then.value > 0 or now.value - then.value < by:
        return None
    above, below = (then, now) if factor > 1 else (now, then)
    regardless = now.value >= enough or above.value >= enough_times * max(below.value, TINY)
    if not regardless and run.reward_since(then.last) >= STALLED:
        return None
    rows = [value for _, value, _ in run.columns[key].last[-run.window :]]
    return None if median and statistics.median(rows) < then.value / factor else log_ratio(above, below, now)
