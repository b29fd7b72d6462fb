"""What the runs that are there say: curves, accuracies, completions to a target, windows, tests; no torch, no scipy.

A run that diverged has no accuracy at its end. In means, tests and tables it counts with 0, or with the lowest held-out
accuracy that any run of the comparison measured, if that is below 0 (rewards may be negative). When a rate is chosen it
has no figure: the rate with fewer diverged runs wins (`plan.best_rate`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from oblrpo.compare.plan import Plan, PlannedRun, best_rate
from oblrpo.compare.spec import Spec, Target, Variant
from oblrpo.errors import InputError
from oblrpo.intervals import GeometricMean, Mean, geometric_mean, mean, smooth, student_t, within
from oblrpo.report.curves import variance_ratios
from oblrpo.report.record import LAST_STEPS
from oblrpo.runs import Metrics
from oblrpo.settings import TrainConfig

ENDED = ("finished", "unmeasured", "diverged")  # states of runs to which nothing more will come
Curve = list[tuple[float, float]]  # (completions trained on so far, value)


@dataclass(eq=False)
class Result:
    """A run and what it left."""

    run: PlannedRun
    config: TrainConfig  # as adjusted when the run began
    state: str
    """finished, unmeasured (finished, but without a last held-out accuracy), diverged, failed, part (of its steps) or
    none."""
    why: str  # why the run is not finished; empty if it is
    rows: list[Metrics]  # the metrics so far
    final: float | None  # held-out accuracy at the end, or what a diverged run counts with; None if there is neither

    def __post_init__(self) -> None:
        self.rate, self.seed = self.config.optim.learning_rate, self.config.run.seed
        self.before = self.rows[0].get("eval/accuracy") if self.rows else None  # held-out, before the first step
        self.per_step = self.config.rollout.prompts_per_step * self.config.rollout.num_generations
        self.measured_at_its_ends = not 0 < self.config.run.eval_steps < self.config.run.steps  # held-out accuracy

    @property
    def fell(self) -> bool:
        """Whether the run ended below where it began, or diverged."""
        if self.state == "diverged":
            return True
        return self.before is not None and self.final is not None and self.final < self.before

    def curve(self, name: str) -> Curve:
        """Return the curve called `accuracy` or `reward`, without steps at which every completion was masked.

        The reward of step s is of the policy after s - 1 updates.
        """
        key, updates_ahead = ("eval/accuracy", 0) if name == "accuracy" else ("reward", 1)
        return [
            ((row["step"] - updates_ahead) * self.per_step, row[key]) for row in self.rows if row.get(key) is not None
        ]

    def last_reward(self) -> float | None:
        """Return the mean reward over the last steps that are there."""
        rewards = [value for _, value in self.curve("reward")[-LAST_STEPS:]]
        return statistics.fmean(rewards) if rewards else None

    def completions_to(self, level: float | None, target: Target) -> float | None:
        """Return the completions until the smoothed curve reaches the level.

        They are infinite if the run ended below it. They are None if it has not ended, where there is no level, and
        where accuracy was measured at its ends only.
        """
        if level is None or (target.curve == "accuracy" and self.measured_at_its_ends):
            return None
        curve = self.curve(target.curve)
        if not curve:
            return None if self.state != "diverged" else math.inf
        x, y = zip(*curve, strict=True)
        reached = crossing(x, smooth(y, target.window), level)
        return None if math.isinf(reached) and self.state not in ENDED else reached

    def variance_ratio(self, baseline: str) -> float | None:
        """Return the gradient variance under a baseline over RLOO's: the geometric mean over the ledger's steps."""
        ratios = variance_ratios(self.rows, baseline)
        return geometric_mean(ratios).value if ratios else None


@dataclass(eq=False)
class Outcome:
    """What became of one variant. Means are over the seeds that have ended."""

    variant: Variant
    results: list[Result]
    rate: float | None  # the best rate over the seeds that choose it
    by_rate: dict[float, list[float]]
    """Final accuracies on the seeds that choose the rate, of every rate that has them all."""
    window: Window | None  # the usable rates

    def __post_init__(self) -> None:
        self.best = [result for result in self.results if result.rate == self.rate]
        self.finals = {result.seed: result.final for result in self.best if result.final is not None}
        self.before = _mean(result.before for result in self.best)  # held-out accuracy before the first step
        self.final = _mean(self.finals.values())  # and at the end
        self.fallen = sum(result.fell for result in self.best)  # seeds that ended below where they began
        self.completions: dict[int, float] = {}  # to the target, by seed

    @property
    def median_completions(self) -> float | None:
        """The median over seeds; infinite if the middle seed never arrives."""
        return statistics.median(self.completions.values()) if self.completions else None

    def variance_ratio(self, baseline: str) -> GeometricMean | None:
        """Return the mean over seeds of the variance ratios at the best rate."""
        ratios = [ratio for result in self.best if (ratio := result.variance_ratio(baseline))]
        return geometric_mean(ratios) if ratios else None

    def began_there(self, seed: int) -> bool:
        """Whether a seed was at the target before a step could have brought it there."""
        return self.completions[seed] <= self.best[0].per_step

    @property
    def all_arrive(self) -> bool:
        """Whether every seed reaches the target, and by learning."""
        arrived = [math.isfinite(value) and not self.began_there(seed) for seed, value in self.completions.items()]
        return bool(self.best) and len(arrived) == len(self.best) and all(arrived)

    def completions_over(self, other: Outcome) -> GeometricMean | None:
        """Return the mean, seed by seed, of this variant's completions to the target over another's.

        It is None unless all seeds of both arrive, by learning: a mean of those that do would flatter.
        """
        if not (self.all_arrive and other.all_arrive and self.completions.keys() == other.completions.keys()):
            return None
        return geometric_mean([value / other.completions[seed] for seed, value in self.completions.items()])

    def end(self, curve: str) -> float | None:
        """Return where its curves end, the mean over seeds; for rewards, None if a run diverged."""
        if curve == "accuracy":
            return self.final.value if self.final else None
        ended = [result for result in self.best if result.state in ENDED]
        rewards = [reward for result in ended if (reward := result.last_reward()) is not None]
        diverged = any(result.state == "diverged" for result in ended)
        return statistics.fmean(rewards) if rewards and not diverged else None


@dataclass(frozen=True)
class Summary:
    """The figures of the whole comparison."""

    spec: Spec
    plan: Plan
    outcomes: list[Outcome]
    reference: Outcome  # what the others are compared with
    level: float | None
    """The level that the target comes to; None if no variant ends above 0, or if runs begin above it."""
    tests: dict[str, Paired]  # final accuracy of each variant less the reference's, paired by seed
    floor: float  # what a diverged run counts with

    @property
    def results(self) -> list[Result]:
        """The results of every run that the plan names."""
        return [result for outcome in self.outcomes for result in outcome.results]


def summarise(plan: Plan) -> Summary:
    """Read what is there."""
    results = {v.name: [_result(run) for run in (*plan.search(v), *plan.later(v))] for v in plan.spec.variants}
    every = [result for of_variant in results.values() for result in of_variant]
    floor = min([0.0, *(value for result in every for _, value in result.curve("accuracy"))])
    for result in every:
        if result.state == "diverged":
            result.final = floor
    outcomes = [_outcome(plan, variant, results[variant.name]) for variant in plan.spec.variants]
    if not any(outcome.final for outcome in outcomes):
        failed = [f" {result.run.name}: {result.why}" for result in every if result.state == "failed"]
        raise InputError(f"{plan.output} holds no finished run of this comparison.{''.join(failed[:1])}")
    level = _level(outcomes, plan.spec.target)
    for outcome in outcomes:
        reached = {result.seed: result.completions_to(level, plan.spec.target) for result in outcome.best}
        outcome.completions = {seed: value for seed, value in reached.items() if value is not None}
    reference = next(outcome for outcome in outcomes if outcome.variant.name == plan.spec.reference)
    tests = {
        outcome.variant.name: test
        for outcome in outcomes
        if outcome is not reference and (test := paired(outcome.finals, reference.finals))
    }
    adjusted = holm([test.p for test in tests.values()])
    tests = {name: replace(test, adjusted=p) for (name, test), p in zip(tests.items(), adjusted, strict=True)}
    return Summary(plan.spec, plan, outcomes, reference, level, tests, floor)


def _level(outcomes: list[Outcome], target: Target) -> float | None:
    """Return what the target comes to, given the ends and beginnings of the runs at each variant's best rate."""
    if target.accuracy is not None:
        return target.accuracy
    best = max((end for outcome in outcomes if (end := outcome.end(target.curve)) is not None), default=-math.inf)
    begun = [curve[0][1] for o in outcomes for result in o.best if (curve := result.curve(target.curve))]
    begins = statistics.fmean(begun or [math.inf])
    start = 0.0 if target.of_gain is None else begins
    share = target.of_best if target.of_gain is None else target.of_gain
    assert share is not None
    level = start + share * (best - start)
    return level if best > start and (level > begins or not begun) else None


def _outcome(plan: Plan, variant: Variant, results: list[Result]) -> Outcome:
    seeds = plan.search_seeds(variant)
    finals_so_far: dict[float, list[float]] = {}
    for result in results:
        if result.final is not None:
            finals_so_far.setdefault(result.rate, []).extend([] if result.state == "diverged" else [result.final])
    rate = plan.best_rate(variant) or best_rate(finals_so_far)  # while none has a result on all its seeds
    ends = {(result.rate, result.seed): result.final for result in results if result.final is not None}
    by_rate = {
        of_rate: [ends[of_rate, seed] for seed in seeds]
        for of_rate in variant.learning_rates
        if all((of_rate, seed) in ends for seed in seeds)
    }
    means = {of_rate: statistics.fmean(accuracies) for of_rate, accuracies in by_rate.items()}
    window = None
    if len(means) > 1 and rate in means and means[rate] > 0:  # of nothing, or less, there is no share
        window = usable(list(means), list(means.values()), best=rate)
    return Outcome(variant, results, rate, by_rate, window)


def _result(run: PlannedRun) -> Result:
    run.check_same()
    failure, rows, final = run.failure(), run.folder.read_metrics(), run.final_accuracy()
    if run.finished():
        masked = "every held-out completion of its last step was masked, so it has no accuracy"
        state, why = ("unmeasured", masked) if final is None else ("finished", "")
    elif failure:
        state, why = failure
    else:
        state, why = ("part", f"step {rows[-1]['step']} of {run.config.run.steps}") if rows else ("none", "not started")
    config = run.as_saved() if run.folder.config_file.is_file() else run.config
    return Result(run, config, state, why, rows, final)


def _mean(values: Iterable[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def band(curves: list[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return x, mean, low and high where all curves have points: 95 % intervals by Student's t; of two, both values."""
    x = sorted(set.intersection(*({x for x, _ in curve} for curve in curves)))
    by_x = [[dict(curve)[point] for curve in curves] for point in x]
    means = [mean(values) for values in by_x]
    if len(curves) > 2:
        low, high = [interval.low for interval in means], [interval.high for interval in means]
    else:
        low, high = [min(values) for values in by_x], [max(values) for values in by_x]
    return x, [interval.value for interval in means], low, high


@dataclass(frozen=True)
class Paired:
    """The mean difference a - b over the seeds that both have, and the two-sided p of Student's paired t test.

    There is no p (None) for a single seed, and where all differences are equal, which leaves no noise to test against.
    """

    difference: Mean
    p: float | None
    adjusted: float | None = None  # the p adjusted for how many tests there are (`holm`)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Compare two variants seed by seed; None without a common seed."""
    differences = [a[seed] - b[seed] for seed in a if seed in b]
    if not differences:
        return None
    difference = mean(differences)
    if not difference.margin:
        return Paired(difference, None)
    df = difference.n - 1
    t = abs(difference.value) * student_t(df) / difference.margin
    return Paired(difference, 1 - within(t, df))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Adjust several p values for their number by Holm's step-down method; None stays None and does not count."""
    order = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        adjusted[place] = highest
    return adjusted


def crossing(x: Sequence[float], y: Sequence[float], level: float) -> float:
    """Return the first x at which y, linear between its points, reaches the level; infinite if it never does."""
    for place, value in enumerate(y):
        if value >= level:
            if place == 0:
                return x[0]
            before = y[place - 1]
            return x[place - 1] + (level - before) / (value - before) * (x[place] - x[place - 1])
    return math.inf


@dataclass(frozen=True)
class Window:
    """The rates around the best at which final accuracy is at least a share of the best's.

    Between the grid's rates accuracy is taken as linear in the logarithm of the rate. An open end is the grid's: the
    window may extend further.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool


def usable(rates: Sequence[float], finals: Sequence[float], share: float = 0.9, best: float | None = None) -> Window:
    """Return the window of a grid in rising order, given its mean final accuracies.

    `best` is the rate that the window lies around; unless given, the one of the highest accuracy. Accuracy there must
    be above 0.
    """
    top = max(range(len(rates)), key=finals.__getitem__) if best is None else list(rates).index(best)
    level = share * finals[top]
    logs = [math.log(rate) for rate in rates]
    low, open_low = _edge(logs[top::-1], finals[top::-1], level)
    high, open_high = _edge(logs[top:], finals[top:], level)
    return Window(low, high, open_low, open_high)


def _edge(logs: Sequence[float], finals: Sequence[float], level: float) -> tuple[float, bool]:
    """Return where the accuracies, from the best outwards, first fall below the level, and whether they never do."""
    for place in range(1, len(logs)):
        if finals[place] < level:
            inside = (finals[place - 1] - level) / (finals[place - 1] - finals[place])
            return math.exp(logs[place - 1] + inside * (logs[place] - logs[place - 1])), False
    return math.exp(logs[-1]), True
