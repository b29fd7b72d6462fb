"""What the runs that are there say: curves, final accuracies, completions to a target, windows, tests; no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from oblrpo.compare.plan import Plan, Run, final_accuracy
from oblrpo.compare.spec import Spec, Target, Variant
from oblrpo.compare.statistics import Paired, Window, crossing, holm, paired, usable
from oblrpo.errors import InputError
from oblrpo.intervals import Mean, mean, smooth
from oblrpo.report.ledger import log_ratios
from oblrpo.runs import Metrics

LAST = 20
"""Steps over which the reward at the end is averaged."""

USABLE = 0.9
"""Share of a variant's best final accuracy at which a rate counts as usable."""

Curve = list[tuple[float, float]]
"""(completions trained on so far, value)."""


@dataclass(frozen=True)
class Result:
    """A run and what it left."""

    run: Run
    variant: str
    rate: float
    seed: int
    state: str
    """finished, diverged, failed, part (of its steps) or none."""
    why: str
    rows: list[Metrics]
    final: float | None

    @property
    def per_step(self) -> int:
        """Completions a step."""
        return self.run.config.rollout.prompts_per_step * self.run.config.rollout.num_generations

    @property
    def measured_at_its_ends(self) -> bool:
        """No held-out accuracy but that before the first and after the last step."""
        run = self.run.config.run
        return not 0 < run.eval_steps < run.steps

    def accuracy(self) -> Curve:
        """Held-out accuracy."""
        return [(row["step"] * self.per_step, row["eval/accuracy"]) for row in self.rows if "eval/accuracy" in row]

    def reward(self) -> Curve:
        """Mean reward of the batches; that of step s is of the policy after s - 1 updates."""
        return [
            ((row["step"] - 1) * self.per_step, row["reward"]) for row in self.rows if row.get("reward") is not None
        ]

    def curve(self, name: str) -> Curve:
        """`accuracy` or `reward` by name."""
        return self.accuracy() if name == "accuracy" else self.reward()

    def last_reward(self) -> float | None:
        """Mean over the last steps that are there."""
        rewards = [value for _, value in self.reward()[-LAST:]]
        return statistics.fmean(rewards) if rewards else None

    def completions_to(self, level: float, target: Target) -> float | None:
        """Completions until the smoothed curve reaches the level: infinite if it ended below, None if it goes on.

        None, too, where accuracy is measured at the ends of the run alone.
        """
        if target.curve == "accuracy" and self.measured_at_its_ends:
            return None
        curve = self.curve(target.curve)
        if not curve:
            return None if self.state != "diverged" else math.inf
        x, y = zip(*curve, strict=True)
        reached = crossing(x, smooth(y, target.window), level)
        return None if math.isinf(reached) and self.state not in {"finished", "diverged"} else reached

    def variance_ratio(self, baseline: str) -> float | None:
        """Gradient variance under a baseline over RLOO's in the same batch: geometric mean over the ledger's steps."""
        logs = log_ratios(self.rows, baseline)
        return math.exp(statistics.fmean(logs)) if logs else None


@dataclass(frozen=True)
class Outcome:
    """One variant. Means are over the seeds that have ended; `rate` is the best over the seeds that chose it."""

    variant: Variant
    results: list[Result]
    rate: float | None
    best: list[Result]
    """Runs at that rate."""
    before: Mean | None
    final: Mean | None
    by_rate: dict[float, list[float]]
    """Final accuracies on the seeds that choose the rate, of every rate that has them all."""
    window: Window | None
    completions: dict[int, float]
    """To the target, by seed."""

    @property
    def finals(self) -> dict[int, float]:
        """Final accuracies at the best rate, by seed."""
        return {result.seed: result.final for result in self.best if result.final is not None}

    @property
    def fallen(self) -> int:
        """How many seeds at the best rate ended below where they began."""
        begun = {result.seed: result.accuracy()[0][1] for result in self.best if result.accuracy()}
        return sum(final < begun.get(seed, math.inf) for seed, final in self.finals.items())  # inf: it diverged at once

    @property
    def median_completions(self) -> float | None:
        """Over seeds; infinite if that of the middle seed never arrives."""
        return statistics.median(self.completions.values()) if self.completions else None

    def variance_ratio(self, baseline: str) -> Mean | None:
        """Of the runs at the best rate; its mean is geometric over seeds, too, and its margin that of the logarithm."""
        found = [ratio for ratio in (result.variance_ratio(baseline) for result in self.best) if ratio]
        return geometric(found) if found else None

    def began_there(self, seed: int) -> bool:
        """Whether a seed was at the target before a step could have brought it there."""
        return self.completions[seed] <= self.best[0].per_step

    @property
    def all_arrive(self) -> bool:
        """Whether every seed reaches the target, and by learning."""
        arrived = [math.isfinite(value) and not self.began_there(seed) for seed, value in self.completions.items()]
        return bool(self.best) and len(arrived) == len(self.best) and all(arrived)

    def completions_over(self, other: Outcome) -> Mean | None:
        """To the target over another's, seed by seed: geometric mean, margin that of the logarithm.

        None unless all seeds of both arrive, by learning: a mean of those that do would flatter.
        """
        if not (self.all_arrive and other.all_arrive and self.completions.keys() == other.completions.keys()):
            return None
        return geometric([value / other.completions[seed] for seed, value in self.completions.items()])

    def end(self, curve: str) -> float | None:
        """Where its curves end, mean over seeds; of rewards, which have no least value, None if a run diverged."""
        if curve == "accuracy":
            return self.final.value if self.final else None
        ended = [result.last_reward() for result in self.best if result.state == "finished"]
        found = [value for value in ended if value is not None]
        diverged = any(result.state == "diverged" for result in self.best)
        return statistics.fmean(found) if found and not diverged else None


@dataclass(frozen=True)
class Summary:
    """The whole comparison."""

    spec: Spec
    plan: Plan
    outcomes: list[Outcome]
    reference: Outcome
    """What the others are compared with."""
    level: float | None
    """Of the target; None if no variant ends above 0, or above where runs begin, so that there is none."""
    tests: dict[str, Paired]
    """Final accuracy of each variant less the reference's, paired by seed."""
    adjusted: dict[str, float | None]
    """Their p values, adjusted for how many they are (Holm)."""

    @property
    def results(self) -> list[Result]:
        """Of every run the plan names."""
        return [result for outcome in self.outcomes for result in outcome.results]


def summarise(plan: Plan) -> Summary:
    """Read what is there.

    Raises:
        InputError: there is no finished run, or a folder holds a run of other settings.
    """
    outcomes = [_outcome(plan, variant) for variant in plan.spec.variants]
    if not any(outcome.final for outcome in outcomes):
        failed = [f" {r.run.name}: {r.why}" for o in outcomes for r in o.results if r.state == "failed"]
        raise InputError(f"{plan.output} holds no finished run of this comparison.{''.join(failed[:1])}")
    level = _level(outcomes, plan.spec.target)
    for outcome in outcomes:
        if level is not None:
            found = {result.seed: result.completions_to(level, plan.spec.target) for result in outcome.best}
            outcome.completions.update({seed: value for seed, value in found.items() if value is not None})
    reference = next(outcome for outcome in outcomes if outcome.variant.name == plan.spec.reference)
    tests = {
        outcome.variant.name: test
        for outcome in outcomes
        if outcome is not reference and (test := paired(outcome.finals, reference.finals))
    }
    adjusted = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    return Summary(plan.spec, plan, outcomes, reference, level, tests, adjusted)


def _level(outcomes: list[Outcome], target: Target) -> float | None:
    """What the target comes to, from the ends and beginnings of the runs at each variant's best rate."""
    if target.accuracy is not None:
        return target.accuracy
    best = max((end for outcome in outcomes if (end := outcome.end(target.curve)) is not None), default=-math.inf)
    begun = [curve[0][1] for o in outcomes for result in o.best if (curve := result.curve(target.curve))]
    start = 0.0 if target.of_gain is None else statistics.fmean(begun or [math.inf])
    share = target.of_best if target.of_gain is None else target.of_gain
    assert share is not None
    return start + share * (best - start) if best > start else None


def _outcome(plan: Plan, variant: Variant) -> Outcome:
    results = [_result(run, variant) for run in (*plan.search(variant), *plan.later(variant))]
    seeds = plan.search_seeds(variant)
    rate = plan.best_rate(variant) or _foremost(results)
    finals = {(result.rate, result.seed): result.final for result in results}
    by_rate = {
        each: [final for seed in seeds if (final := finals[each, seed]) is not None] for each in variant.learning_rates
    }
    by_rate = {each: found for each, found in by_rate.items() if len(found) == len(seeds)}
    best = [result for result in results if result.rate == rate]
    before = [result.accuracy()[0][1] for result in best if result.accuracy()]
    window = None
    if len(by_rate) > 1 and any(map(any, by_rate.values())):
        window = usable(list(by_rate), [statistics.fmean(found) for found in by_rate.values()], USABLE)
    ended = [result.final for result in best if result.final is not None]
    return Outcome(
        variant, results, rate, best, _mean(before), _mean(ended), by_rate, window, completions={}
    )  # fmt: skip


def _foremost(results: list[Result]) -> float | None:
    """While no rate has all its seeds: the best of those with the most."""
    by_rate: dict[float, list[float]] = {}
    for result in results:
        if result.final is not None:
            by_rate.setdefault(result.rate, []).append(result.final)
    return max(by_rate, key=lambda rate: (len(by_rate[rate]), statistics.fmean(by_rate[rate])), default=None)


def _mean(values: list[float]) -> Mean | None:
    return mean(values) if values else None


def geometric(ratios: list[float]) -> Mean:
    """Geometric mean; its margin is that of the logarithm."""
    logs = mean([math.log(ratio) for ratio in ratios])
    return Mean(math.exp(logs.value), logs.margin, logs.n)


def _result(run: Run, variant: Variant) -> Result:
    run.check_same()
    failure, rows = run.failure(), run.rows()
    if run.finished():
        state, why = "finished", ""
    elif failure:
        state, why = failure
    else:
        state, why = ("part", f"step {rows[-1]['step']} of {run.config.run.steps}") if rows else ("none", "not begun")
    config = run.config
    return Result(run, variant.name, config.optim.learning_rate, config.run.seed, state, why, rows, final_accuracy(run))


def band(curves: list[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """x, mean, low, high at the points that all curves share: 95 % by Student's t, of two seeds the two values."""
    shared = set.intersection(*({x for x, _ in curve} for curve in curves))
    x = sorted(shared)
    by_x = [[dict(curve)[point] for curve in curves] for point in x]
    spread: Callable[[list[float]], tuple[float, float]] = _interval if len(curves) > 2 else _extremes
    low, high = zip(*map(spread, by_x), strict=True) if x else ((), ())
    return x, [statistics.fmean(values) for values in by_x], list(low), list(high)


def _interval(values: list[float]) -> tuple[float, float]:
    found = mean(values)
    return found.value - (found.margin or 0.0), found.value + (found.margin or 0.0)


def _extremes(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)
