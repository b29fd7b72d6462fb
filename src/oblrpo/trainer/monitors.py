"""Failures that a run's own metrics show; each is told once, with what to do."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import Any

from oblrpo.estimators import BASELINES, RULES

PATIENCE = 10
"""The number of steps in a row after which a state counts as lasting."""

COLLAPSED = 0.01
"""The part of its own highest value so far at which the schedule's factor, or the signal's share, has collapsed."""

EXPLODED = 10.0
"""The multiple of its median over earlier steps at which the spread of baselines has exploded."""

FALLEN = 0.5
"""The share of the best mean reward of `PATIENCE` steps, or of the gain until then, whose loss counts as a fall."""

CERTAIN = 4.5
"""How many standard errors a fall must exceed; many, because the best is the luckiest of many means."""

MISMATCHED, UNCORRECTED = 1.0, 0.1
"""The mean |log pi(o|q) - log sampler(o|q)| of completions, in nats, from which on the sampler is not the policy.
Where weights make up for it, this costs variance and truncation; where nothing does, it biases."""

SHRUNK = {"entropy": 0.01, "completions/mean_length": 0.2}
"""The share of its own highest mean of `PATIENCE` steps at which entropy, or completions' length, has collapsed."""

FLAT = 0.9
"""The share of prompts without a difference between rewards at which rewards are flat."""


MOST_SKIPPED = 5
"""Steps in a row without a finite gradient after which a run ends, or after half of its steps."""

COLLAPSES = ("fallen", *SHRUNK)
"""What a run stops at with `stop_on_collapse`."""


class Monitors:
    """Watches for steps without a gradient, a fallen policy, a lost learning rate, flat rewards, wild baselines.

    Args:
        most_skipped: after how many skipped steps in a row the run ends.
        stop_on_collapse: the run's `stop_on_collapse`.
        corrects: whether weights make up for what the sampler draws otherwise than the policy.
        baseline: the run's baseline.
        schedule: the run's schedule, a key of `estimators.RULES`.
    """

    def __init__(
        self,
        corrects: bool = True,
        baseline: str = "oblr",
        schedule: str = "debiased",
        most_skipped: int = MOST_SKIPPED,
        stop_on_collapse: bool = False,
    ) -> None:
        self.stop = ""
        """Why the run is to end after this step, in a sentence; empty if it goes on."""
        self._most_skipped, self._stop_on_collapse, self._skipped = most_skipped, stop_on_collapse, 0
        self._corrects, self._baseline, self._rule = corrects, baseline, RULES[schedule]
        self._told: set[str] = set()
        self._highest = 0.0
        self._collapsed = self._flat = self._unfelt = 0
        self._spreads: list[float] = []  # in order
        self._rewards: deque[tuple[float, float]] = deque(maxlen=PATIENCE)
        self._lowest, self._best = math.inf, (-math.inf, 0.0, 0.0)
        self._shrinkage = {key: _Shrinkage(key, share) for key, share in SHRUNK.items()}

    def observe(self, metrics: dict[str, Any], skipped: str = "") -> list[str]:
        """Return the new warnings after a step. A resumed run shows its earlier steps again, to stay quiet on them.

        Args:
            metrics: the step's.
            skipped: what was not finite in it, in words, if it was skipped.
        """
        self.stop = ""
        if "reward" not in metrics:
            return []
        told = self._update_skipped(metrics, skipped) if metrics.get("skipped") else ""
        self._skipped = self._skipped + 1 if told and metrics["learning_rate"] == 0 else 0
        if self._skipped:
            self.stop = self._too_many_skipped(metrics, skipped) if self._skipped >= self._most_skipped else ""
            return self._new({"skipped": told})
        if metrics.get("frac_prompts_masked") == 1:
            return self._new({"masked": self._no_update(metrics)})
        found = {
            "skipped": told,
            "nothing": self._nothing_to_learn(metrics),
            "unfelt": self._updates_are_lost(metrics),
            "fallen": self._policy_has_fallen(metrics),
            "flat": self._rewards_are_flat(metrics),
            "collapse": self._rate_collapsed(metrics),
            "baselines": self._baselines_exploded(metrics),
            "mismatch": self._sampler_astray(metrics),
        } | {key: self._collapsing(each.seen(metrics)) for key, each in self._shrinkage.items()}
        if found["fallen"] or found["nothing"]:
            found["flat"] = ""  # not for want of easier prompts, or said already
        if self._stop_on_collapse:
            self.stop = next((text for key in COLLAPSES if (text := found[key])), "")
        return self._new(found)

    def _new(self, found: dict[str, str]) -> list[str]:
        new = {key: text for key, text in found.items() if text and key not in self._told}
        self._told |= set(new)
        return list(new.values())

    def _update_skipped(self, metrics: dict[str, Any], what: str) -> str:
        return (
            f"an update of step {metrics['step']} was skipped{_not_finite(what)}, and changed nothing. Look at the "
            f"rewards in completions/step_{metrics['step']}.jsonl. Further ones show as skipped in metrics.jsonl; "
            f"the run stops after {self._most_skipped} steps in a row."
        )

    def _too_many_skipped(self, metrics: dict[str, Any], what: str) -> str:
        return (
            f"the last {self._skipped} steps were skipped{_not_finite(what)}: the policy is as it was before. If "
            f"rewards in completions/step_{metrics['step']}.jsonl are outliers, mend the reward and go on with "
            f"--resume --accept-changed. Else lower learning_rate ({self._rule.to_shorten}), and start anew or "
            "from an older one."
        )

    def _collapsing(self, told: str) -> str:
        mend = f"Steps are too long: {self._rule.to_shorten}, and start again or from an earlier checkpoint."
        return f"{told} {mend}" if told else ""

    def _no_update(self, metrics: dict[str, Any]) -> str:
        return (
            f"{metrics['completions/masked_ratio']:.0%} of this step's completions have no reward, and fewer than two "
            "prompts have enough of them for the baseline: no update was made. Look at the reward function's errors; "
            "further steps without an update show as learning_rate 0 in metrics.jsonl."
        )

    def _nothing_to_learn(self, metrics: dict[str, Any]) -> str:
        if metrics.get("grad_norm") != 0:
            return ""
        step = metrics["step"]
        if metrics["reward"] == 0 and metrics["reward_stderr"] == 0:
            return (
                f"no completion of step {step} earned a reward: there is no gradient, and no update was made. Read "
                f"completions/step_{step}.jsonl: if answers there are right, mend the reward; if none is, choose "
                "easier prompts, raise num_generations, or begin with supervised learning (sft_data, warm_start_steps)."
            )
        return (
            f"in step {step} all completions of a prompt earned the same (mean reward {metrics['reward']:.2f}): there "
            "is no gradient, and no update was made. Choose prompts that are solved sometimes, or raise "
            "num_generations."
        )

    def _updates_are_lost(self, metrics: dict[str, Any]) -> str:
        self._unfelt = self._unfelt + 1 if metrics.get("step_kl") == 0 and metrics.get("grad_norm") else 0
        if self._unfelt < PATIENCE:
            return ""
        return (
            f"the updates of {PATIENCE} steps, at a learning rate of {metrics['learning_rate']:.1e}, changed no "
            "log-probability: they are lost in rounding. Start from a higher learning_rate."
        )

    def _sampler_astray(self, metrics: dict[str, Any]) -> str:
        apart = metrics.get("sampling/sequence_logp_difference/mean")
        if apart is None or apart <= (MISMATCHED if self._corrects else UNCORRECTED):
            return ""
        token = metrics["sampling/sampling_logp_difference/mean"]
        return (
            f"the sampler's log-probabilities of completions are {apart:.2g} nats from the trainer's in the mean "
            f"({token:.2g} a token), "
            + (
                "and sampler_correction measured takes them for equal: the gradient is biased. Set it to truncated."
                if not self._corrects
                else f"and {metrics['sampling/truncated_ratio']:.0%} of the importance weights are truncated, which "
                "biases. Bring the two closer (dtype in vllm_args, the type the policy is trained in), or shorten "
                "completions."
            )
        )

    def _rewards_are_flat(self, metrics: dict[str, Any]) -> str:
        share = metrics["frac_reward_zero_std"]
        if share is None or math.isnan(share):  # one completion a prompt
            return ""
        self._flat = self._flat + 1 if share > FLAT else 0
        if self._flat < PATIENCE:
            return ""
        lost = self._best[0] - metrics["reward"] > FALLEN * abs(self._best[0])
        return (
            f"for {PATIENCE} steps more than {FLAT:.0%} of the prompts earned one reward with all their completions "
            f"and taught nothing (mean reward {metrics['reward']:.2f}): choose "
            + ("easier" if metrics["reward"] < 0.5 else "harder")
            + " prompts, raise num_generations, or check the reward."
            + (f" The mean of {PATIENCE} steps was {self._best[0]:.2f} at its best: or lower the rate." if lost else "")
        )

    def _policy_has_fallen(self, metrics: dict[str, Any]) -> str:
        stderr = metrics.get("reward_stderr")
        self._rewards.append((metrics["reward"], math.nan if stderr is None else stderr))
        if len(self._rewards) < PATIENCE:
            return ""
        now = sum(reward for reward, _ in self._rewards) / PATIENCE
        noise = math.hypot(*(stderr for _, stderr in self._rewards)) / PATIENCE
        self._lowest = min(self._lowest, now)
        if now > self._best[0]:
            self._best = now, noise, now - self._lowest
        best, noise_then, gained = self._best
        if not best - now > CERTAIN * math.hypot(noise, noise_then):  # nor if the noise is not known, NaN
            return ""
        if best - now <= FALLEN * max(abs(best), gained):
            return ""
        return (
            f"the policy has fallen: the mean reward of the last {PATIENCE} steps is {now:.3f}, and was "
            f"{best:.3f} at its best. Steps are too long: {self._rule.to_shorten}, and start again or from an earlier "
            "checkpoint."
        )

    def _rate_collapsed(self, metrics: dict[str, Any]) -> str:
        share = self._rule.share_in(metrics)  # not the rate: a cosine lowers that
        if math.isnan(share) or metrics.get("grad_norm") == 0:
            return ""
        self._highest = max(self._highest, share)
        self._collapsed = self._collapsed + 1 if share <= COLLAPSED * self._highest else 0
        if self._collapsed < PATIENCE:
            return ""
        critical = metrics["critical_batch_size"]
        known = (
            "" if critical is None or not math.isfinite(critical) else f" (critical batch about {critical:.0f} prompts)"
        )
        return (
            f"the {self._rule.watched} has been at most {COLLAPSED:.0%} of its highest for {PATIENCE} "
            f"steps: the gradient's signal is lost in its noise{known}. Raise prompts_per_step, stop here, or take "
            "schedule off to go on regardless."
        )

    def _baselines_exploded(self, metrics: dict[str, Any]) -> str:
        spread = metrics["baseline/spread"]
        if spread is None or math.isnan(spread):
            return ""
        usual = self._spreads[len(self._spreads) // 2] if len(self._spreads) >= PATIENCE else math.inf
        bisect.insort(self._spreads, spread)
        if usual == 0 or spread <= EXPLODED * usual:  # 0: most steps so far paid nothing, which is no scale
            return ""
        if spread <= (metrics.get("reward_std") or 0.0):  # wide for baselines near 0, and yet within what rewards do
            return ""
        shrink = "" if "prior" in BASELINES[self._baseline].needs else ", or take the baseline oblr_shrunk"
        return (
            f"baselines of this step's prompts spread {spread / usual:.0f} times as wide as usual "
            f"({spread:.3g} against {usual:.3g}): look at the rewards in completions/ for outliers, clip them{shrink}."
        )


def _not_finite(what: str) -> str:
    return f" ({f'a {what}' if what else 'a gradient'} was NaN or infinite)"


class _Shrinkage:
    """Whether a metric has shrunk to a small share of its highest while rewards are no higher than they were then."""

    def __init__(self, key: str, share: float) -> None:
        self.key, self.share = key, share
        self._last: deque[tuple[float, float]] = deque(maxlen=PATIENCE)
        self._highest, self._reward_then = 0.0, math.inf

    def seen(self, metrics: dict[str, Any]) -> str:
        """What has become of it after this step, in a sentence; empty if nothing has."""
        value = metrics.get(self.key)
        if value is None or not math.isfinite(value):
            return ""
        self._last.append((value, metrics["reward"]))
        if len(self._last) < PATIENCE:
            return ""
        now, reward = (sum(column) / PATIENCE for column in zip(*self._last, strict=True))
        if now > self._highest:
            self._highest, self._reward_then = now, reward
        if not now < self.share * self._highest or reward > self._reward_then:
            return ""
        return (
            f"the policy has collapsed: the mean of {self.key} over {PATIENCE} steps is {now:.3g}, and was "
            f"{self._highest:.3g} at its highest, and completions earn no more than then."
        )
