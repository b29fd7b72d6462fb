"""What the runs that are there say: curves, final accuracies, completions to a target, windows, tests; no torch.

A run that diverged has no accuracy at its end. In means, tests and tables it counts with 0, or with the lowest held-out
accuracy that any run of the comparison measured, if that is below 0 (rewards may be negative). When a rate is chosen it
has no figure: the rate with fewer diverged runs wins (`plan.foremost`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace

from oblrpo.compare.plan import Plan, PlannedRun, foremost
from oblrpo.compare.spec import Spec, Target, Variant
from oblrpo.compare.statistics import Paired, Window, crossing, holm, paired, usable
from oblrpo.errors import InputError
from oblrpo.intervals import GeometricMean, Mean, geometric_mean, mean, smooth
from oblrpo.report.ledger import variance_ratios
from oblrpo.runs import Metrics

LAST = 20  # steps over which the reward at the end is averaged
USABLE = 0.9  # share of a variant's best final accuracy at which a rate counts as usable
ENDED = ("finished", "unmeasured", "diverged")  # states of runs to which nothing more will come
Curve = list[tuple[float, float]]  # (completions trained on so far, value)


@dataclass(frozen=True)
class Result:
    """A run and what it left."""

    run: PlannedRun
    variant: str
    rate: float
    seed: int
    state: str
    """finished, unmeasured (finished, but without a last held-out accuracy), diverged, failed, part (of its steps) or
    none."""
    why: str  # why the run is not finished; empty if it is
    rows: list[Metrics]  # the metrics so far
    before: float | None  # held-out accuracy before the first step
    final: float | None  # held-out accuracy at the end, or what a diverged run counts with; None if there is neither
    per_step: int  # completions that a step trains on
    measured_at_its_ends: bool  # whether held-out accuracy was taken only before the first and after the last step

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
        rewards = [value for _, value in self.curve("reward")[-LAST:]]
        return statistics.fmean(rewards) if rewards else None

    def completions_to(self, level: float, target: Target) -> float | None:
        """Return the completions until the smoothed curve reaches the level.

        They are infinite if the run ended below it. They are None if it has not ended, and where accuracy was measured
        at its ends only.
        """
        if target.curve == "accuracy" and self.measured_at_its_ends:
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
    best: list[Result]  # the runs at that rate
    before: Mean | None  # held-out accuracy before the first step of those runs
    final: Mean | None  # held-out accuracy at the end of those runs
    by_rate: dict[float, list[float]]
    """Final accuracies on the seeds that choose the rate, of every rate that has them all."""
    window: Window | None  # the usable rates
    completions: dict[int, float] = field(default_factory=dict)  # completions to the target, by seed

    def __post_init__(self) -> None:
        self.finals = {result.seed: result.final for result in self.best if result.final is not None}  # at that rate
        self.fallen = sum(result.fell for result in self.best)  # seeds at that rate that ended below where they began

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
    adjusted: dict[str, float | None]  # the p values of these tests, adjusted for how many they are (Holm)
    floor: float  # what a diverged run counts with

    @property
    def results(self) -> list[Result]:
        """The results of every run that the plan names."""
        return [result for outcome in self.outcomes for result in outcome.results]


def summarise(plan: Plan) -> Summary:
    """Read what is there."""
    results = {v.name: [_result(run, v) for run in (*plan.search(v), *plan.later(v))] for v in plan.spec.variants}
    every = [result for of_variant in results.values() for result in of_variant]
    lowest = min((value for result in every for _, value in result.curve("accuracy")), default=0.0)
    floor = min(0.0, lowest)
    for of_variant in results.values():
        of_variant[:] = [replace(r, final=floor) if r.state == "diverged" else r for r in of_variant]
    outcomes = [_outcome(plan, variant, results[variant.name]) for variant in plan.spec.variants]
    if not any(outcome.final for outcome in outcomes):
        failed = [f" {r.run.name}: {r.why}" for o in outcomes for r in o.results if r.state == "failed"]
        raise InputError(f"{plan.output} holds no finished run of this comparison.{''.join(failed[:1])}")
    level = _level(outcomes, plan.spec.target)
    for outcome in outcomes:
        if level is not None:
            reached = {result.seed: result.completions_to(level, plan.spec.target) for result in outcome.best}
            outcome.completions.update({seed: value for seed, value in reached.items() if value is not None})
    reference = next(outcome for outcome in outcomes if outcome.variant.name == plan.spec.reference)
    tests = {
        outcome.variant.name: test
        for outcome in outcomes
        if outcome is not reference and (test := paired(outcome.finals, reference.finals))
    }
    adjusted = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    return Summary(plan.spec, plan, outcomes, reference, level, tests, adjusted, floor)


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
    rate = plan.best_rate(variant) or foremost(finals_so_far)  # while none has a result on all its seeds
    ends = {(result.rate, result.seed): result.final for result in results if result.final is not None}
    by_rate = {
        of_rate: [ends[of_rate, seed] for seed in seeds]
        for of_rate in variant.learning_rates
        if all((of_rate, seed) in ends for seed in seeds)
    }
    means = {of_rate: statistics.fmean(accuracies) for of_rate, accuracies in by_rate.items()}
    window = None
    if len(means) > 1 and rate in means and means[rate] > 0:  # of nothing, or less, there is no share
        window = usable(list(means), list(means.values()), USABLE, rate)
    best = [result for result in results if result.rate == rate]
    before = [result.before for result in best if result.before is not None]
    final = [result.final for result in best if result.final is not None]
    return Outcome(
        variant, results, rate, best, mean(before) if before else None, mean(final) if final else None, by_rate, window
    )


def _result(run: PlannedRun, variant: Variant) -> Result:
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
    before = rows[0].get("eval/accuracy") if rows else None
    per_step = config.rollout.prompts_per_step * config.rollout.num_generations
    at_its_ends = not 0 < config.run.eval_steps < config.run.steps
    return Result(
        run, variant.name, config.optim.learning_rate, config.run.seed, state, why, rows, before, final, per_step,
        at_its_ends,
    )  # fmt: skip


def band(curves: list[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return x, mean, low and high at the points that all curves share.

    Low and high are a 95 % interval by Student's t over seeds; where there are two seeds, the two values.
    """
    x = sorted(set.intersection(*({x for x, _ in curve} for curve in curves)))
    by_x = [[dict(curve)[point] for curve in curves] for point in x]
    means = [mean(values) for values in by_x]
    if len(curves) > 2:
        low, high = [interval.low for interval in means], [interval.high for interval in means]
    else:
        low, high = [min(values) for values in by_x], [max(values) for values in by_x]
    return x, [interval.value for interval in means], low, high
