"""What to do next: at most three suggestions, each from a measurement of the run, with what it would give.

A suggestion is made only where the whole 95 % interval of its gain is a gain, and where nothing that is wrong with the
run explains what was measured. A new one is a function, a row of `SUGGESTIONS`, and a case of
`lab.benchmarks.next_steps`, which follows each of them and compares what came out.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

from oblrpo.diagnosis.course import TINY, finite, spread_of
from oblrpo.diagnosis.watch import Watch
from oblrpo.errors import InputError
from oblrpo.intervals import Z95, GeometricMean, geometric_mean, jackknife, mean, student_t
from oblrpo.runs import RunFolder
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.tables.baselines import BASELINES

MOST = 3  # suggestions
WORTH, WORTH_OF_RANGE = 1.15, 0.05
"""What is worth a sentence: a cost so many times less, or a reward higher by this share of the range of rewards."""
READ_STEPS, READ_BYTES = 200, 1 << 25  # the newest completions that are read: of so many steps, and of 32 MiB
LAST_STEPS = 20  # whose completions say how many are truncated
FEWEST_ROWS, FEWEST_PROMPTS = 20, 20
TOLERANCE = 0.05  # of what a reward has gained: what it may still have risen where it is called flat
FLAT_SHARE = 0.25  # of a run, which is flat for so long at least
BINS = 500  # a longer run is looked at in so many parts
LATE = 0.75  # of the limit: completions that end beyond tell how many more would end beyond the limit
LONGER, WORTH_FEWER = 2.0, 4 / 3
"""With fewer prompts a step, the most times as many steps, and the least factor: that of half the critical batch."""
NEARLY_NOISE = 0.1  # the most N SNR at which more prompts are suggested, by the upper end of its interval
MORE = 4  # times as many prompts
ROUND = [times * 10**zeros for zeros in range(6) for times in (2, 4, 5, 10)]  # what `eval_steps` is multiplied by
ORDER = {"reward": 0, "completions": 1, "time": 1, "steps": 2}
"""What a gain may be of: a better policy comes first, then what costs less, and then what takes only fewer steps."""

Row = Mapping[str, Any]


class Gain(NamedTuple):
    """What is promised, and the ends of its interval: a factor, or of a reward a difference."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class NextStep:
    """Something to do next."""

    name: str
    of: str  # what it saves, or that the reward rises: a key of `ORDER`
    gain: Gain
    sentence: str  # what was measured, and what it would give
    setting: str  # what to set; empty for a log of another trainer
    prompts: tuple[str, ...] = ()  # those that it is about

    def __str__(self) -> str:
        return f"{self.sentence} {self.setting}".rstrip()

    def plain(self) -> dict[str, Any]:
        """It as a JSON object."""
        return vars(self) | {"gain": self.gain._asdict(), "prompts": list(self.prompts)}


@dataclass(frozen=True)
class Left:
    """What a run has left behind."""

    rows: Sequence[Row]
    settings: Mapping[str, Any] = field(default_factory=dict)  # by flag; empty for a log of another trainer
    folder: RunFolder | None = None

    @cached_property
    def steps(self) -> list[Row]:
        """The steps of RL that have a reward."""
        return self.having("step", "reward")

    def having(self, *keys: str, rows: Sequence[Row] | None = None) -> list[Row]:
        """The rows, of all or of some, in which these metrics have a finite value."""
        rows = self.rows if rows is None else rows
        return [row for row in rows if all(number(row, key) is not None for key in keys)]

    @cached_property
    def measured(self) -> list[Row]:
        """The rows with a held-out accuracy and its error."""
        return self.having("step", "eval/accuracy", "eval/accuracy_stderr")

    @cached_property
    def completions(self) -> dict[int, list[dict[str, Any]]]:
        """The newest completions that have a reward, by their step, in order."""
        found: dict[int, list[dict[str, Any]]] = {}
        left = READ_BYTES
        for step in (int(row["step"]) for row in reversed(self.steps[-READ_STEPS:])):
            file = self.folder.completions / f"step_{step}.jsonl" if self.folder else None
            left -= file.stat().st_size if file and file.is_file() else 0
            if self.folder is None or left < 0:
                break
            try:
                texts = self.folder.read_completions(step)
            except InputError:  # a damaged file; the page says so where it shows it
                continue
            found[step] = [each for each in texts if number(each, "reward") is not None and "prompt" in each]
        return dict(sorted(found.items()))

    @cached_property
    def flat(self) -> Flat | None:
        """Where the reward stopped rising, if it did."""
        return flat_of([row["reward"] for row in self.steps])

    @property
    def learning(self) -> list[Row]:
        """The steps before the reward stopped rising."""
        return self.steps[: self.flat.first] if self.flat else self.steps

    @property
    def constant_rate(self) -> bool:
        """Whether no schedule ties the rate to the run's last step, so that it may end anywhere."""
        return str(self.settings.get("lr_scheduler_type", "constant")) == "constant"

    @property
    def range(self) -> float:
        """How far rewards lie apart."""
        rewards = [number(row, key) for row in self.steps for key in ("reward", "reward_min", "reward_max")]
        known = [each for each in rewards if each is not None]
        return max(known, default=0.0) - min(known, default=0.0)

    def setting(self, words: str) -> str:
        """What to set, of a run of ours."""
        return f"({words})" if self.settings and words else ""


def number(row: Row, key: str) -> float | None:
    """A metric of a row; None if it has no finite value."""
    return finite(row.get(key))


def seconds_of(row: Row) -> float:
    """What a step took, with its evaluation and its files."""
    parts = [number(row, key) or 0.0 for key in row if key.startswith("time/")]
    return math.fsum(parts) if parts else number(row, "step_time") or 0.0


def line_of(values: Sequence[float]) -> tuple[float, float]:
    """The rise of a line through some values, from the first to the last, and half of its 95 % interval.

    The noise is that of neighbouring values, in which a course that is no line does not count.
    """
    n = len(values)
    squares = n * (n * n - 1) / 12  # of the places, from the middle one
    rise = math.fsum((place - (n - 1) / 2) * value for place, value in enumerate(values)) / squares * (n - 1)
    return rise, student_t(n - 2) * spread_of(list(values)) * (n - 1) / math.sqrt(squares)


class Flat(NamedTuple):
    """The last part of a run, in which the reward rises no more."""

    first: int  # of its steps
    rise: float  # from its first steps to its second half, as a share of all that was gained
    margin: float  # half of the 95 % interval of that


def flat_of(rewards: Sequence[float]) -> Flat | None:
    """The longest last part of a run, a quarter at least, in which the reward has surely gained next to nothing.

    That is a twentieth of what was gained in all, by the upper ends of two 95 % intervals: of the difference between
    the part's second half and its first steps, and of the rise of a line through all of it.
    """
    width = max(1, len(rewards) // BINS)
    means = [statistics.fmean(rewards[at : at + width]) for at in range(len(rewards) % width, len(rewards), width)]
    n = len(means)
    few = max(3, n // 20)
    begun = statistics.fmean(means[:few]) if n >= FEWEST_ROWS else 0.0
    for first in range(few, n - max(10, math.ceil(FLAT_SHARE * n)) + 1, max(1, n // 100)):
        part = means[first:]
        early, late, spread = part[: max(3, len(part) // 20)], part[len(part) // 2 :], spread_of(part)
        rise, gained = statistics.fmean(late) - statistics.fmean(early), statistics.fmean(late) - begun
        margin = Z95 * spread * math.sqrt(1 / len(early) + 1 / len(late))
        most = max(rise + margin, sum(line_of(part)), margin - rise)
        if gained > 3 * spread / math.sqrt(few) and most <= TOLERANCE * gained:
            return Flat(len(rewards) - width * len(part), rise / gained, margin / gained)
    return None


def stop_earlier(run: Left) -> NextStep | None:
    """The share of the time, or of the steps, that bought nothing, since the reward stopped rising."""
    if run.flat is None or not run.constant_rate:
        return None
    step, heldout = int(run.steps[run.flat.first]["step"]), ""
    if len(within := [row for row in run.measured if row["step"] >= step]) > 1:
        step = int(within[0]["step"])  # until then it may have risen
        rise = within[-1]["eval/accuracy"] - within[0]["eval/accuracy"]
        margin = Z95 * math.hypot(within[0]["eval/accuracy_stderr"], within[-1]["eval/accuracy_stderr"])
        if rise - margin > TOLERANCE * (within[-1]["eval/accuracy"] - run.measured[0]["eval/accuracy"]):
            return None
        heldout = f" and {rise:+.3f} ± {margin:.3f} of held-out accuracy"
    rest = [row for row in run.steps if row["step"] > step]
    after, total = (math.fsum(map(seconds_of, rows)) for rows in (rest, run.rows))
    what, share = ("time", after / total) if total else ("steps", len(rest) / len(run.steps))
    if not 1 - 1 / WORTH <= share < 1:
        return None
    kept = [each for each in run.folder.checkpoint_steps() if each >= step] if run.folder else []
    good = f"; checkpoints/step_{kept[0]} is as good as the last" if kept and kept[0] < run.steps[-1]["step"] else ""
    sentence = (
        f"Flat since step {step}: {share:.0%} of the {what} bought {run.flat.rise:.0%} ± {run.flat.margin:.0%} of the "
        f"gain in reward{heldout}."
    )
    return NextStep("stop earlier", what, Gain(*[1 / (1 - share)] * 3), sentence, run.setting(f"--steps {step}{good}"))


def earlier_checkpoint(run: Left) -> NextStep | None:
    """A checkpoint that is surely better than the last one, though it was chosen among all that were measured."""
    if len(run.measured) < 2:
        return None
    last, best = run.measured[-1], max(run.measured, key=lambda row: row["eval/accuracy"])
    less, step = best["eval/accuracy"] - last["eval/accuracy"], int(best["step"])
    error = math.hypot(best["eval/accuracy_stderr"], last["eval/accuracy_stderr"])
    low = less - NormalDist().inv_cdf(1 - 0.025 / (len(run.measured) - 1)) * error
    if low <= 0 or less < WORTH_OF_RANGE * run.range:
        return None
    kept = run.folder is not None and step in run.folder.checkpoint_steps()
    words = f"oblrpo export {run.folder.path} --step {step}" if run.folder and kept else f"--steps {step}" * (step > 0)
    sentence = (
        f"Held-out accuracy was best at step {step}, {best['eval/accuracy']:.3f}, and ended at "
        f"{last['eval/accuracy']:.3f}. That is {less:.3f} less; {low:.3f} of it are certain, as the best of "
        f"{len(run.measured)} measurements."
    )
    gain = Gain(less, low, less + Z95 * error)
    return NextStep("take an earlier checkpoint", "reward", gain, sentence, run.setting(words))


def raise_limit(run: Left) -> NextStep | None:
    """What twice the limit would give, if completions go on ending beyond it as they do in its last quarter.

    With h the share of those that reach three quarters of the limit and end before it, 1 - (1 - h)^4 of the truncated
    ones would end within twice the limit, and earn what those earn that end in the last quarter.
    """
    limit = run.settings.get("max_completion_length")
    texts = [each for step in list(run.completions)[-LAST_STEPS:] for each in run.completions[step]]
    if not isinstance(limit, int) or any(number(each, "length") is None for each in texts):
        return None

    def ends_of(part: Sequence[Row]) -> tuple[list[float], list[float]]:
        """The rewards of those that were truncated, and of those that ended in the last quarter."""
        late = [each for each in part if each["length"] > LATE * limit]
        return [x["reward"] for x in late if x.get("clipped")], [x["reward"] for x in late if not x.get("clipped")]

    def more(part: Sequence[Row]) -> float:
        cut, late = ends_of(part)
        if not cut or not late:
            return 0.0
        ends = 1 - (len(cut) / len(cut + late)) ** 4
        return len(cut) / len(part) * ends * (statistics.fmean(late) - statistics.fmean(cut))

    cut, late = ends_of(texts)
    if min(len(cut), len(late)) < FEWEST_PROMPTS:
        return None
    found, share, stays = jackknife(by_prompt(texts), more), len(cut) / len(texts), len(cut) / len(cut + late)
    if found.low <= 0 or found.value < WORTH_OF_RANGE * run.range:
        return None
    tokens = share * limit / 4 * math.fsum(stays**quarter for quarter in range(4))
    cost = 1 + tokens / statistics.fmean(each["length"] for each in texts)
    sentence = (
        f"{share:.0%} of the last completions were truncated and earned {statistics.fmean(cut):.3g} on average; those "
        f"that ended just before the limit earned {statistics.fmean(late):.3g}. If more of them end as those do, twice "
        f"the limit raises the reward by {found.value:.3f} ± {found.margin:.3f}, for {cost:.2g} times the tokens."
    )
    gain, words = Gain(found.value, found.low, found.high), f"--max-completion-length {2 * limit}"
    return NextStep("raise the limit", "reward", gain, sentence, run.setting(words))


def by_prompt(texts: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Completions by their prompt."""
    found = defaultdict(list)
    for each in texts:
        found[str(each["prompt"])].append(each)
    return list(found.values())


def go_on(run: Left) -> NextStep | None:
    """What a quarter more steps would give, where the reward surely rose in the last quarter.

    At most, the next quarter gives as much as the last one. At least, it brings the reward nearer to the mean over
    prompts of the best that each has earned lately (the highest of all, where completions are not known) by the same
    factor as the last quarter, and gives less than that by as much as that gave less than the one before.
    """
    n = len(run.steps)
    quarter = n // 4
    if n < 2 * FEWEST_ROWS or not run.constant_rate or n < (number(run.settings, "steps") or 0):
        return None
    rewards = [row["reward"] for row in run.steps]
    (before, _), (rise, margin) = line_of(rewards[n - 2 * quarter : n - quarter]), line_of(rewards[n - quarter :])
    highest = max(number(row, "reward_max") or row["reward"] for row in run.steps)
    lately = by_prompt([each for step in list(run.completions)[-LAST_STEPS:] for each in run.completions[step]])
    best = statistics.fmean(max(each["reward"] for each in group) for group in lately) if lately else highest
    level = statistics.fmean(rewards[n - quarter :]) + rise / 2
    if rise <= margin or best <= level:
        return None
    slows = min(1.0, rise / before) if before > 0 else 1.0
    least = slows * (rise - margin)
    low, high = (best - level) * least / (best - level + least), min(highest - level, rise + margin)
    if low < WORTH_OF_RANGE * run.range:
        return None
    sentence = (
        f"Still rising: the reward gained {rise:+.3f} ± {margin:.3f} in the last quarter of the steps, and "
        f"{before:+.3f} in the one before. If it goes on so, a quarter more gives {low:+.3f} to {high:+.3f}."
    )
    gain = Gain((low + high) / 2, low, high)
    return NextStep("go on", "reward", gain, sentence, run.setting(f"--resume --steps {n + quarter}"))


def leave_out(run: Left) -> NextStep | None:
    """What leaving out the prompts would give whose completions have all earned the same so far.

    A prompt's part of the gradient goes with the variance of its rewards. At each prompt's newest visit this variance
    is compared with what was known before: with those left out whose earlier visits all agreed, a completion brings
    (1 - what is lost of it) / (1 - their share) times as much. The newest visit has no part in the choice.
    """
    steps, visits = {int(row["step"]) for row in run.learning}, defaultdict[str, list[list[float]]](list)
    for texts in (texts for step, texts in run.completions.items() if step in steps):
        for group in by_prompt(texts):
            visits[str(group[0]["prompt"])].append([float(each["reward"]) for each in group])
    again = {prompt: groups for prompt, groups in visits.items() if len(groups) > 1 and len(groups[-1]) > 1}
    if len(again) < FEWEST_PROMPTS:
        return None
    known = [(len(set().union(*groups[:-1])) > 1, statistics.variance(groups[-1])) for groups in again.values()]

    def times(part: Sequence[tuple[bool, float]]) -> float:
        kept, whole = math.fsum(v for differed, v in part if differed), math.fsum(v for _, v in part)
        share = statistics.fmean(differed for differed, _ in part)
        return kept / whole / share if whole and share else 1.0

    found = jackknife([[each] for each in known], times)
    silent = {prompt: groups for prompt, groups in again.items() if len(set().union(*groups)) == 1}
    if found.low <= 1 or found.value < WORTH or not silent:
        return None
    lowest = min(min(group) for groups in again.values() for group in groups)
    never = sum(groups[0][0] == lowest for groups in silent.values())
    earned = "nothing but the lowest reward" if never == len(silent) else "one and the same reward"
    tries = statistics.fmean(sum(map(len, groups)) for groups in silent.values())
    sentence = (
        f"{len(silent)} of {len(again)} prompts have earned {earned} in all of their completions, {tries:.0f} each on "
        f"average. Without them, as many completions give {found.value:.2g} times the signal ({found.low:.2g} to "
        f"{found.high:.2g}, by what such prompts gave when they came up again)."
    )
    setting = run.setting("--data without them; oblrpo diagnose --json lists them")
    return NextStep("leave prompts out", "completions", Gain(found.value, found.low, found.high), sentence, setting,
                    tuple(silent))  # fmt: skip


def smaller_batch(run: Left) -> NextStep | None:
    """Fewer prompts a step, where noise is small beside the signal.

    By theorem 4 a step of N prompts gains in proportion to r / (1 + r), r = N SNR. With k N prompts, what a step gained
    takes (1 + k r) / (k (1 + r)) steps, and k times as many completions. The mean is over the steps in which the reward
    rose, and k the smallest that takes at most twice the steps. Half of the critical batch saves a quarter.
    """
    known = [row for row in run.having("snr", "n_snr", "snr_low", "snr_high", rows=run.learning) if row["snr"] > TINY]
    if len(known) < FEWEST_ROWS // 2 or 2 * len(known) < len(run.learning):
        return None
    sizes = [row["n_snr"] / row["snr"] for row in known]
    prompts = round(statistics.fmean(sizes))
    ratios = [[N * row[key] for N, row in zip(sizes, known, strict=True)] for key in ("snr", "snr_low", "snr_high")]
    for k in (1 / 8, 1 / 4, 1 / 2):
        steps, *ends = (statistics.fmean((1 + k * r) / (k * (1 + r)) for r in of) for of in ratios)
        gain = Gain(*(1 / (k * each) for each in (steps, *ends)))
        if prompts * k >= 2 and gain.low >= WORTH and gain.value >= WORTH_FEWER and steps <= LONGER:
            ratio, low, high = map(statistics.median, ratios)
            fewer = round(prompts * k)
            sentence = (
                f"{prompts} prompts are {ratio:.2g} times ({low:.2g} to {high:.2g}) the critical batch, where noise "
                f"equals signal. {fewer} come as far in {steps:.2g} times the steps, with {1 / gain.value:.2g} times "
                f"the completions ({1 / gain.high:.2g} to {1 / gain.low:.2g}) at most."
            )
            setting = run.setting(f"--prompts-per-step {fewer}")
            return NextStep("smaller batch", "completions", gain, sentence, setting)
    return None


def larger_batch(run: Left) -> NextStep | None:
    """Four times the prompts a step, where the gradient is nearly all noise: fewer steps, and as many completions.

    It is the theorem of `smaller_batch`, with r = N signal / noise of all steps in which the reward rose.
    """
    known = run.having("signal2", "trace_cov", rows=run.learning)
    sizes = [row["n_snr"] / row["snr"] for row in run.having("snr", "n_snr", rows=known) if row["snr"] > TINY]
    if len(known) < FEWEST_ROWS or not sizes:
        return None
    prompts = round(statistics.fmean(sizes))

    def ratio(part: Sequence[Row]) -> float:
        noise = math.fsum(row["trace_cov"] for row in part)
        return prompts * math.fsum(row["signal2"] for row in part) / noise if noise > 0 else math.inf

    r, (rise, margin) = jackknife([[row] for row in known], ratio), line_of([row["reward"] for row in known])
    if r.low <= 0 or not r.high <= NEARLY_NOISE or rise <= margin:  # no signal, or no noise beside it
        return None
    steps, fewest, most = ((1 + MORE * each) / (MORE * (1 + each)) for each in (r.value, r.low, r.high))
    sentence = (
        f"{prompts} prompts are {r.value:.2g} times ({r.low:.2g} to {r.high:.2g}) the critical batch, where noise "
        f"equals signal. {MORE * prompts} come as far in {steps:.2g} times the steps ({fewest:.2g} to {most:.2g}), "
        f"with {MORE * steps:.2g} times the completions: faster where such a step takes less than {1 / steps:.2g} "
        "times as long."
    )
    gain, words = Gain(1 / steps, 1 / most, 1 / fewest), f"--prompts-per-step {MORE * prompts}"
    return NextStep("larger batch", "steps", gain, sentence, run.setting(words))


def other_baseline(run: Left) -> NextStep | None:
    """The unbiased baseline under which this run's own batches would have had the least variance.

    Those that train on prompts whose completions agree, which costs more, are compared with one another only.
    """
    algorithm = ALGORITHMS.get(str(run.settings.get("algorithm")))
    own = str(run.settings.get("baseline") or (algorithm.baseline if algorithm else ""))
    if own not in BASELINES or not BASELINES[own].unbiased:
        return None
    found: dict[str, GeometricMean] = {}
    for name, row in BASELINES.items():
        if row.unbiased and row.trainable and row.learns_from_ties <= BASELINES[own].learns_from_ties and name != own:
            ledgers = run.having(mine := f"variance/{own}", other := f"variance/{name}", rows=run.learning)
            ratios = [each[mine] / each[other] for each in ledgers if each[mine] > 0 and each[other] > 0]
            found |= {name: geometric_mean(ratios)} if len(ratios) > 2 else {}
    name = max(found, key=lambda name: found[name].low, default="")
    if not name or found[name].low < WORTH:
        return None
    gain = Gain(found[name].value, found[name].low, found[name].high)
    sentence = (
        f"On this run's own batches, the gradient's variance under {own} was {gain.value:.2g} times that under {name} "
        f"({gain.low:.2g} to {gain.high:.2g}, {found[name].n} ledgers): {name} has the same noise with "
        f"{1 / gain.value:.2g} times the completions."
    )
    return NextStep("other baseline", "completions", gain, sentence, run.setting(f"--baseline {name}"))


def evaluate_less(run: Left) -> NextStep | None:
    """What evaluating less often would save: so seldom that it takes a tenth of the time at most."""
    every, steps = run.settings.get("eval_steps"), len(run.steps)
    spent = [row["time/evaluation"] for row in run.having("time/evaluation")]
    if not isinstance(every, int) or every < 1 or len(spent) < 4:
        return None
    cost, total = mean(spent), math.fsum(map(seconds_of, run.rows))
    rest = total - math.fsum(spent)

    def counted(interval: int) -> int:
        return 1 + math.ceil(steps / interval)  # step 0 has one, too

    wider = (every * times for times in ROUND)
    new = min(steps, next(each for each in wider if each >= steps or cost.value * counted(each) <= rest / 9))
    fewer, costs = len(spent) - counted(new), (cost.value, cost.low, cost.high)
    saved = [fewer * each / (rest + len(spent) * each) for each in costs]
    gain = Gain(*(1 / (1 - share) for share in saved))
    if not gain.low >= WORTH:
        return None
    sentence = (
        f"Evaluation took {math.fsum(spent) / total:.0%} of the time. Every {new} steps instead of {every}, it saves "
        f"{saved[0]:.0%} of all time ({saved[1]:.0%} to {saved[2]:.0%})."
    )
    return NextStep("evaluate less often", "time", gain, sentence, run.setting(f"--eval-steps {new}"))


SILENCE = frozenset({"silent groups", "no gradient", "rewards agree"})
"""How it shows that completions of a prompt earn the same."""

SUGGESTIONS: dict[Callable[[Left], NextStep | None], frozenset[str] | None] = {
    earlier_checkpoint: None, raise_limit: SILENCE | {"truncation", "all truncated"}, go_on: frozenset(),
    leave_out: SILENCE, smaller_batch: frozenset(), larger_batch: frozenset(), other_baseline: frozenset(),
    evaluate_less: frozenset(), stop_earlier: SILENCE,
}  # fmt: skip
"""Each with the conditions that may be wrong with the run where it is made; None: all. The others explain what was
measured, and their cure comes first."""


def next_steps(watch: Watch, left: Left) -> list[NextStep]:
    """What to do next, at most three: what makes the policy better, and then what costs less, the most first."""
    wrong = {finding.name for finding in watch.findings if finding.wrong}
    made = [suggest(left) for suggest, despite in SUGGESTIONS.items() if despite is None or wrong <= despite]
    found = {each.name: each for each in made if each}
    if "take an earlier checkpoint" in found:  # what more steps did is said there
        found = {name: each for name, each in found.items() if name not in {"stop earlier", "go on"}}
    return sorted(found.values(), key=lambda each: (ORDER[each.of], -each.gain.value))[:MOST]
