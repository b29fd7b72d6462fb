"""A condition: one row of the table of what can go wrong in a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Set
from dataclasses import KW_ONLY, dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

from oblrpo.diagnosis.course import STALLED, Course, Mean, wander

TINY = 1e-12
SURE = 4.5  # how many standard errors a statistic must lie from what a healthy run shows, where nothing else says
FALSE = 0.01  # the chance that a run, of whatever length, shows one window apart from another that is not


def surely(comparisons: int, values: int) -> float:
    """How many standard errors one of so many comparisons surely lies apart, with noise from so many values.

    The quantile of Student's t for the chance FALSE / comparisons, by Wallace's formula; of the squares of neighbouring
    differences of n values, which overlap, the mean varies as with n / 1.5 degrees of freedom.
    """
    free = values / 1.5
    normal = -NormalDist().inv_cdf(FALSE / comparisons) * (8 * free + 3) / (8 * free + 1)
    return math.sqrt(free * math.expm1(normal * normal / free))


class Reading(NamedTuple):
    """What a statistic shows at a step: the greater, the worse."""

    value: float
    stderr: float  # its standard error; 0 where it is counted and not estimated
    since: int  # the first step of the window that shows it
    words: dict[str, Any]  # what the sentence says beside `value`
    sure: float = 0.0
    """How many standard errors it must lie from what a healthy run shows, where it is the worst of many; else 0."""


@dataclass(frozen=True, eq=False)
class Condition:
    """Something that is wrong with a run: a statistic with its noise, and a threshold."""

    name: str
    statistic: Callable[[Course], Reading | None]  # None where nothing can be said at this step
    columns: tuple[str, ...]  # the metrics that it needs
    threshold: float  # the statistic from which on the condition holds
    _: KW_ONLY
    sentence: str
    cure: str
    description: str = ""
    """What it is and looks like, where several conditions share a statistic; else the statistic's docstring says so."""
    turns: Set[str] = frozenset()  # what its cure turns, and in which direction: "-learning_rate"
    brings: Set[str] = frozenset()
    """What it may bring along: a cause is reported with its cure, and these beneath it without one."""
    healthy: float = 0.0  # what the statistic of a healthy run does not exceed but by its noise
    sure: float = SURE  # how many standard errors a reading must lie above what a healthy run shows
    wrong: bool = True  # False: it is a note, and nothing is wrong
    updated: bool = False
    """Its finding is updated after every step; its words say when it was `found`, and `until` when it was last seen."""
    mends: bool = False  # once half of the way from `then` to `now` is made up for, it is a note in the past tense
    rows: bool = False
    """It looks at rows one by one, and must see each: windows of long runs are not looked at after every row."""
    collapse: bool = False  # a run with `stop_on_collapse` ends where it holds

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
        return reading.value >= self.threshold and self.sureness(reading) >= (reading.sure or self.sure)


def mean(run: Course, key: str) -> Reading | None:
    """The mean of a metric over the last window."""
    now = run.now(key)
    return Reading(now.value, now.stderr, now.first, {}) if now else None


def compared(run: Course, key: str, then: Mean, now: Mean, part: float = 0.5) -> tuple[float, float]:
    """The standard error of a mean that was chosen among all to compare now with, and how many of these it takes.

    It is taken from how the mean went before it last left a level, that part of the way from then to now, or from its
    whole course, whichever shows the change more surely: a long stay at the new level says how noisy a level is.
    """
    sign, noises, past = math.copysign(1.0, now.value - then.value), run.columns[key].noise, run.past(key, now.first)
    level, found = sign * (then.value + part * (now.value - then.value)), []
    known = next((n for n in range(len(past), 0, -1) if sign * past[n - 1].value <= level), 0)
    for n in (known, len(past)):
        if n not in noises:
            noises[n] = math.sqrt(wander(past[:n], run.window))
        found.append((noises[n], surely(run.count * max(1, len(past)), max(1, n) * run.window)))
    return min(found, key=lambda noise: noise[0] * noise[1])


def log_ratio(run: Course, key: str, then: Mean, now: Mean, falls: bool, part: float = 0.5) -> Reading:
    """By what log a metric has grown, or fallen, since a window that was chosen among all, with its error."""
    noise, sure = compared(run, key, then, now, part)
    ratio = math.log(max(now.value, TINY) / max(then.value, TINY)) * (-1 if falls else 1)
    each_own = (max(each.stderr / each.value, noise / then.value) for each in (then, now) if each.value > TINY)
    words = {"now": now.value, "then": then.value, "step": then.last}
    return Reading(ratio, min(math.hypot(*each_own), 1.0), now.first, words, sure)


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
    regardless = now.value >= enough or now.value >= enough_times * then.value
    if not regardless and run.reward_since(then.last) >= STALLED:
        return None
    rows = [value for _, value, _ in run.columns[key].last[-run.window :]]
    if median and statistics.median(rows) < then.value / factor:
        return None
    return log_ratio(run, key, then, now, falls=factor > 1, part=0.0)
