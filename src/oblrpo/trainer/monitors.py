"""Failures that a run's own metrics show; each is told once, with what to do. `CONDITIONS` has a row for each."""

import bisect
import math
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from oblrpo.estimators import BASELINES, RULES

PATIENCE = 10  # the number of steps in a row after which a state counts as lasting
COLLAPSED = 0.01  # the part of its own highest value at which the schedule's factor has collapsed
MOST_SKIPPED = 5  # steps in a row without a finite gradient after which a run ends, or after half of its steps
EXPLODED = 10.0  # the multiple of its median over earlier steps at which the spread of baselines has exploded
FALLEN = 0.5  # the share of the best mean reward of `PATIENCE` steps, or of the gain until then, whose loss is a fall
CERTAIN = 4.5  # how many standard errors a fall must exceed; many, because the best is the luckiest of many means
FLAT = 0.9  # the share of prompts without a difference between rewards at which rewards are flat
MISMATCHED = {True: 1.0, False: 0.1}
"""The mean |log pi(o|q) - log sampler(o|q)| of completions, in nats, from which on the sampler is not the policy.
Where weights make up for it (True), this costs variance and truncation; where nothing does, it biases."""
SHRUNK = {"entropy": 0.01, "completions/mean_length": 0.2}
"""The share of its own highest mean of `PATIENCE` steps at which entropy, or completions' length, has collapsed."""

Metrics = dict[str, Any]


class Monitors:
    """What a run has shown so far, looked at after every step; the arguments are settings of the run."""

    def __init__(
        self,
        corrects: bool = True,
        baseline: str = "oblr",
        schedule: str = "debiased",
        most_skipped: int = MOST_SKIPPED,
        stop_on_collapse: bool = False,
    ) -> None:
        self.stop = ""  # why the run is to end after this step, in a sentence; empty if it goes on
        self.corrects, self.rule, self.stop_on_collapse = corrects, RULES[schedule], stop_on_collapse
        self.in_a_row: Counter[str] = Counter()  # steps in which a condition has held, up to now
        self.told_before: set[str] = set()
        self.highest_factor = 0.0
        self.spreads: list[float] = []  # in order
        self.rewards: deque[tuple[float, float]] = deque(maxlen=PATIENCE)  # with their standard errors
        self.lowest, self.best, self.noise_then, self.gained = math.inf, -math.inf, 0.0, 0.0  # of mean rewards
        self.courses = {key: deque[tuple[float, float]](maxlen=PATIENCE) for key in SHRUNK}  # with the rewards
        self.highest = dict.fromkeys(SHRUNK, (0.0, math.inf))  # mean of a course, and the mean reward at that time
        shrink = "" if "prior" in BASELINES[baseline].needs else ", or take the baseline oblr_shrunk"
        measured = self.rule.measures_updates
        shorten = "lower schedule_kl" if measured else "take a third of learning_rate, or schedule auto"
        too_long = f"Steps are too long: {shorten}, and start again or from an earlier checkpoint."
        self.figures: dict[str, Any] = {  # what sentences say beside the step's metrics
            "patience": PATIENCE, "collapsed": COLLAPSED, "flat": FLAT, "shrink": shrink,
            "shorten": shorten, "too_long": too_long,
            "most_skipped": most_skipped,
        }  # fmt: skip

    def observe(self, metrics: Metrics, skipped: str = "") -> list[str]:
        """Return the new warnings after a step; `skipped` says in words what was not finite in it, if it was skipped.

        A resumed run shows its earlier steps again, to stay quiet on them.
        """
        self.stop = ""
        if "reward" not in metrics:
            return []
        self.figures["infinite"] = f"a {skipped or 'gradient'} was NaN or infinite"
        warnings = {"skipped": self._say(SKIPPED, metrics) if metrics.get("skipped") else ""}
        no_update = warnings["skipped"] and metrics["learning_rate"] == 0
        self.figures["skipped_now"] = self.in_a_row["skipped"] = self.in_a_row["skipped"] + 1 if no_update else 0
        if no_update:
            if self.in_a_row["skipped"] >= self.figures["most_skipped"]:
                self.stop = self._say(TOO_MANY_SKIPPED, metrics)
        elif metrics.get("frac_prompts_masked") == 1:
            warnings["masked"] = self._say(MASKED, metrics)
        else:
            for condition in CONDITIONS:
                warnings[condition.name] = warnings.get(condition.name) or self._warning(condition, metrics)
            if warnings["fallen"] or warnings["nothing"]:
                warnings["flat"] = ""  # not for want of easier prompts, or said already
            if self.stop_on_collapse:
                self.stop = next((warnings[name] for name in COLLAPSES if warnings[name]), "")
        new = {name: sentence for name, sentence in warnings.items() if sentence and name not in self.told_before}
        self.told_before |= new.keys()
        return list(new.values())

    def _warning(self, condition: "Condition", metrics: Metrics) -> str:
        holds = condition.holds(self, metrics)
        if holds is None:
            return ""
        self.in_a_row[condition.name] = self.in_a_row[condition.name] + 1 if holds else 0
        lasting = self.in_a_row[condition.name] >= condition.steps
        return self._say(condition.sentence, metrics) if lasting else ""

    def _say(self, sentence: str, metrics: Metrics) -> str:
        return sentence.format_map(metrics | self.figures)


class Condition(NamedTuple):
    """Something that is wrong with a run."""

    name: str  # under which it is told once
    sentence: str
    holds: Callable[[Monitors, Metrics], bool | None]  # after a step; None if the step says nothing about it
    steps: int = 1  # in a row, after which it is told


def fallen(run: Monitors, metrics: Metrics) -> bool | None:
    """Whether the mean reward has lost half of its best, or of what was gained, and not by chance."""
    stderr = metrics.get("reward_stderr")
    run.rewards.append((metrics["reward"], math.nan if stderr is None else stderr))
    if len(run.rewards) < PATIENCE:
        return None
    now = sum(reward for reward, _ in run.rewards) / PATIENCE
    noise = math.hypot(*(stderr for _, stderr in run.rewards)) / PATIENCE
    run.lowest = min(run.lowest, now)
    if now > run.best:
        run.best, run.noise_then, run.gained = now, noise, now - run.lowest
    run.figures |= {"reward_now": now, "best": run.best}
    certain = run.best - now > CERTAIN * math.hypot(noise, run.noise_then)  # not where the noise is not known, NaN
    return certain and run.best - now > FALLEN * max(abs(run.best), run.gained)


def flat(run: Monitors, metrics: Metrics) -> bool | None:
    """Whether nearly all prompts taught nothing."""
    share, reward = metrics["frac_reward_zero_std"], metrics["reward"]
    if share is None or math.isnan(share):  # one completion a prompt
        return None
    lost = run.best - reward > FALLEN * abs(run.best)
    or_lower = f" The mean of {PATIENCE} steps was {run.best:.2f} at its best: or lower the rate."
    run.figures |= {"which": "easier" if reward < 0.5 else "harder", "or_lower": or_lower if lost else ""}
    return bool(share > FLAT)


def collapsed(run: Monitors, metrics: Metrics) -> bool | None:
    """Whether the schedule has next to nothing left of its highest factor."""
    if run.rule.measures_updates or metrics.get("grad_norm") == 0:  # a measured rate follows no signal
        return None
    factor = float(metrics["lr_factor"])  # not the rate: a cosine lowers that
    run.highest_factor = max(run.highest_factor, factor)
    batch = metrics["critical_batch_size"]
    unclear = batch is None or not math.isfinite(batch)
    run.figures["critical"] = "" if unclear else f" (critical batch about {batch:.0f} prompts)"
    return factor <= COLLAPSED * run.highest_factor


def exploded(run: Monitors, metrics: Metrics) -> bool | None:
    """Whether baselines spread far wider than usual, and wider than rewards do: those near 0 may do the first."""
    spread = metrics["baseline/spread"]
    if spread is None or math.isnan(spread):
        return None
    usual = run.spreads[len(run.spreads) // 2] if len(run.spreads) >= PATIENCE else math.inf
    bisect.insort(run.spreads, spread)
    if usual == 0:  # most steps so far paid nothing, which is no scale
        return None
    run.figures |= {"usual": usual, "times": spread / usual}
    return bool(spread > EXPLODED * usual and spread > (metrics.get("reward_std") or 0.0))


def mismatched(corrects: bool, run: Monitors, metrics: Metrics) -> bool:
    """Whether the sampler's distribution is not the policy's, with weights that make up for it or without."""
    apart = metrics.get("sampling/sequence_logp_difference/mean")
    return run.corrects == corrects and apart is not None and apart > MISMATCHED[corrects]


def shrunk(key: str, run: Monitors, metrics: Metrics) -> bool | None:
    """Whether a metric has shrunk to a small share of its highest while rewards are no higher than they were then."""
    value, course = metrics.get(key), run.courses[key]
    if value is None or not math.isfinite(value):
        return None
    course.append((value, metrics["reward"]))
    if len(course) < PATIENCE:
        return None
    now, reward = (sum(column) / PATIENCE for column in zip(*course, strict=True))
    run.highest[key] = highest, reward_then = max(run.highest[key], (now, reward), key=lambda mean: mean[0])
    run.figures |= {f"{key} now": now, f"{key} then": highest}
    return bool(now < SHRUNK[key] * highest and reward <= reward_then)


SKIPPED = (
    "an update of step {step} was skipped ({infinite}), and changed nothing. Look at the rewards in "
    "completions/step_{step}.jsonl. Further ones show as skipped in metrics.jsonl; the run stops after {most_skipped} "
    "steps in a row."
)
TOO_MANY_SKIPPED = (
    "the last {skipped_now} steps were skipped ({infinite}): the policy is as it was before. If rewards in "
    "completions/step_{step}.jsonl are outliers, mend the reward and go on with --resume --accept-changed. Else lower "
    "learning_rate ({shorten}), and start anew or from an older one."
)
MASKED = (
    "{completions/masked_ratio:.0%} of this step's completions have no reward, and fewer than two prompts have enough "
    "of them for the baseline: no update was made. Look at the reward function's errors; further steps without an "
    "update show as learning_rate 0 in metrics.jsonl."
)
APART = (
    "the sampler's log-probabilities of completions are {sampling/sequence_logp_difference/mean:.2g} nats from the "
    "trainer's in the mean ({sampling/sampling_logp_difference/mean:.2g} a token), and "
)
CONDITIONS = (
    Condition(
        "nothing",
        "no completion of step {step} earned a reward: there is no gradient, and no update was made. Read "
        "completions/step_{step}.jsonl: if answers there are right, mend the reward; if none is, choose easier "
        "prompts, raise num_generations, or begin with supervised learning (sft_data, warm_start_steps).",
        lambda run, metrics: metrics.get("grad_norm") == 0 == metrics["reward"] == metrics["reward_stderr"],
    ),
    Condition(
        "nothing",
        "in step {step} all completions of a prompt earned the same (mean reward {reward:.2f}): there is no gradient, "
        "and no update was made. Choose prompts that are solved sometimes, or raise num_generations.",
        lambda run, metrics: metrics.get("grad_norm") == 0,
    ),
    Condition(
        "unfelt",
        "the updates of {patience} steps, at a learning rate of {learning_rate:.1e}, changed no log-probability: they "
        "are lost in rounding. Start from a higher learning_rate.",
        lambda run, metrics: metrics.get("step_kl") == 0 and bool(metrics.get("grad_norm")),
        PATIENCE,
    ),
    Condition(
        "fallen",
        "the policy has fallen: the mean reward of the last {patience} steps is {reward_now:.3f}, and was {best:.3f} "
        "at its best. {too_long}",
        fallen,
    ),
    Condition(
        "flat",
        "for {patience} steps more than {flat:.0%} of the prompts earned one reward with all their completions and "
        "taught nothing (mean reward {reward:.2f}): choose {which} prompts, raise num_generations, or check the reward."
        "{or_lower}",
        flat,
        PATIENCE,
    ),
    Condition(
        "collapse",
        "the schedule's factor on the learning rate has been at most {collapsed:.0%} of its highest for {patience} "
        "steps: the gradient's signal is lost in its noise{critical}. Raise prompts_per_step, stop here, or take "
        "schedule off to go on regardless.",
        collapsed,
        PATIENCE,
    ),
    Condition(
        "baselines",
        "baselines of this step's prompts spread {times:.0f} times as wide as usual ({baseline/spread:.3g} against "
        "{usual:.3g}): look at the rewards in completions/ for outliers, clip them{shrink}.",
        exploded,
    ),
    Condition(
        "mismatch",
        APART + "sampler_correction measured takes them for equal: the gradient is biased. Set it to truncated.",
        partial(mismatched, False),
    ),
    Condition(
        "mismatch",
        APART + "{sampling/truncated_ratio:.0%} of the importance weights are truncated, which biases. Bring the two "
        "closer (dtype in vllm_args, the type the policy is trained in), or shorten completions.",
        partial(mismatched, True),
    ),
    *(
        Condition(
            key,
            f"the policy has collapsed: the mean of {key} over {PATIENCE} steps is {{{key} now:.3g}}, and was "
            f"{{{key} then:.3g}} at its highest, and completions earn no more than then. {{too_long}}",
            partial(shrunk, key),
        )
        for key in SHRUNK
    ),
)
"""Every condition, in the order in which they are told; of two rows of a name the first that holds."""

COLLAPSES = ("fallen", *SHRUNK)  # what a run stops at with `stop_on_collapse`
