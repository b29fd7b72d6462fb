"""How soon runs get to a reward: completions and CPU seconds, over those of a reference's runs of the same seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from lab.results.book import Book, Line, Run
from lab.results.plan import Part
from lab.results.tables import Label, reported, table
from oblrpo.compare.table import factor
from oblrpo.intervals import geometric_mean

SHARE = 0.8
"""How much of the way from the first reward to the best arm's last is the target."""
AVERAGED = 3
"""Over how many lines of a book a reward is averaged, the last of them where it is said to be."""

Clock = Literal["completions", "cpu_seconds"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


def smooth(lines: Sequence[Line]) -> list[float]:
    """Mean rewards of the lines after step 0, from the line on that ends the first average."""
    rewards = [line.reward for line in lines[1:]]
    return [statistics.fmean(rewards[k - AVERAGED : k]) for k in range(AVERAGED, len(rewards) + 1)]


def arrival(lines: Sequence[Line], target: float, clock: Clock) -> float:
    """What the clock reads when the averaged reward has first risen to the target; infinite if it never does.

    Between two lines the reward is taken as linear. A run that begins above the target arrives with its first average.
    """
    rewards = smooth(lines)
    at = [getattr(line, clock) for line in lines[AVERAGED:]]
    if rewards[0] >= target:
        return at[0]
    for (low, begun), (high, ended) in pairwise(zip(rewards, at, strict=True)):
        if high >= target:
            return begun + (ended - begun) * (target - low) / (high - low)
    return math.inf


class Pace(NamedTuple):
    """How soon an arm's runs arrive."""

    ratios: list[float]
    """Over the first arm's runs of the same place and seed, where both arrive."""
    arrived: int
    runs: int


def paces(part: Part, book: Book, clock: Clock) -> dict[Label, Pace]:
    """Every arm of a part's report."""
    by_arm = reported(part, book)
    goals = targets(part, by_arm)
    found: dict[Label, Pace] = {}
    first: dict[tuple[str, int, int, int], float] = {}
    for label, runs in by_arm.items():
        mine = {(*run[:3], run.seed): arrival(lines, goals[run[:3]], clock) for run, lines in runs}
        first = first or mine
        arrived = {key: at for key, at in mine.items() if math.isfinite(at)}
        both = [at / first[key] for key, at in arrived.items() if math.isfinite(first.get(key, math.inf))]
        found[label] = Pace(both, len(arrived), len(mine))
    return found


def targets(part: Part, by_arm: dict[Label, list[tuple[Run, list[Line]]]]) -> dict[tuple[str, int, int], float]:
    """At every place that has runs `SHARE` of the way from the first rewards to the best arm's last."""
    goals = {}
    for place in ((policy, *size) for policy, size in part.places):
        here = [found for runs in by_arm.values() if (found := [lines for run, lines in runs if run[:3] == place])]
        if here:
            begun = statistics.fmean(lines[1].reward for runs in here for lines in runs)
            best = max(statistics.fmean(smooth(lines)[-1] for lines in runs) for runs in here)
            goals[place] = begun + SHARE * (best - begun)
    return goals


def pace_report(part: Part, book: Book) -> str:
    """A table of every arm over the part's first, run by run of the same place and seed.

    Figures are geometric means with 95 % intervals by Student's t of the logarithms.
    """
    clocks = {clock: paces(part, book, clock) for clock in CLOCKS}
    labels = list(clocks["completions"])
    rows = [
        [
            *label,
            *(factor(geometric_mean(pace.ratios)) if pace.ratios and label != labels[0] else "" for pace in found),
            f"{found[0].arrived} of {found[0].runs}",
        ]
        for label in labels
        for found in [[by_arm[label] for by_arm in clocks.values()]]
    ]
    over = " ".join(labels[0]).strip() if labels else ""
    titles = ["arm", "rate", f"completions over {over}'s", f"CPU seconds over {over}'s", "runs that arrive"]
    goals = [f"{goal:.3f} ({place[0]})" for place, goal in targets(part, reported(part, book)).items()]
    return f"To a mean reward of {', '.join(goals)}:\n\n{table(titles, rows)}"
