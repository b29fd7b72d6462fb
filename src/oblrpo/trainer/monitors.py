"""Failures that a run's own metrics show; each is told once, with what to do."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import Any

PATIENCE = 10
"""Steps in a row before a state counts as lasting."""

COLLAPSED = 0.01
"""Share of the schedule's highest factor so far, or of the signal's highest share, at which the rate has collapsed."""

EXPLODED = 10.0
"""Times its median over earlier steps at which the spread of baselines has exploded."""

FALLEN = 0.5
"""Share of the best mean reward of `PATIENCE` steps, or of what was gained until then, that is lost when the policy has
fallen."""

CERTAIN = 4.5
"""Standard errors that a fall is more than; many, because the best is the luckiest of many means."""

MISMATCHED = {"truncated": 1.0, "none": 0.1}
"""Mean |log pi(o|q) - log sampler(o|q)| of completions, nats, from which on the sampler is not the policy any more:
where weights make up for it, it costs variance and truncation; where nothing does, it biases."""

FLAT = 0.9
"""Share of prompts without a difference between rewards at which rewards are flat."""


class Monitors:
    """Watches for a fallen policy, learning-rate collapse, flat rewards, exploding baselines, a sampler astray.

    Args:
        correction: `sampler_correction` of the run.
        baseline: of the run.
        schedule: of the run.
        floor: `schedule_floor` of the run.
    """

    def __init__(
        self, correction: str = "truncated", baseline: str = "oblr", schedule: str = "debiased", floor: float = 0.0
    ) -> None:
        self._correction, self._baseline, self._schedule, self._floor = correction, baseline, schedule, floor
        self._told: set[str] = set()
        self._highest = 0.0
        self._collapsed = self._flat = 0
        self._spreads: list[float] = []  # in order
        self._rewards: deque[tuple[float, float]] = deque(maxlen=PATIENCE)
        self._lowest, self._best = math.inf, (-math.inf, 0.0, 0.0)

    def observe(self, metrics: dict[str, Any]) -> list[str]:
        """What is new to tell after a step; a resumed run shows its earlier steps again to stay quiet about them."""
        if "reward" not in metrics:
            return []
        if metrics.get("frac_prompts_masked") == 1:
            found = {"masked": self._no_update(metrics)}
            new = {key: text for key, text in found.items() if key not in self._told}
            self._told |= set(new)
            return list(new.values())
        found = {
            "fallen": self._policy_has_fallen(metrics),
            "flat": self._rewards_are_flat(metrics),
            "collapse": self._rate_collapsed(metrics),
            "baselines": self._baselines_exploded(metrics),
            "mismatch": self._sampler_astray(metrics),
        }
        if found["fallen"]:
            found["flat"] = ""  # not for want of easier prompts
        new = {key: text for key, text in found.items() if text and key not in self._told}
        self._told |= set(new)
        return list(new.values())

    def _no_update(self, metrics: dict[str, Any]) -> str:
        return (
            f"{metrics['completions/masked_ratio']:.0%} of this step's completions have no reward, and fewer than two "
            "prompts have enough of them for the baseline: no update was made. Look at the reward function's errors; "
            "further steps without an update show as learning_rate 0 in metrics.jsonl."
        )

    def _sampler_astray(self, metrics: dict[str, Any]) -> str:
        apart = metrics.get("sampling/sequence_logp_difference/mean")
        if apart is None or apart <= MISMATCHED[self._correction]:
            return ""
        token = metrics["sampling/sampling_logp_difference/mean"]
        return (
            f"the sampler's log-probabilities of completions are {apart:.2g} nats from the trainer's in the mean "
            f"({token:.2g} a token), "
            + (
                "and sampler_correction none takes them for equal: the gradient is biased. Set it to truncated."
                if self._correction == "none"
                else f"and {metrics['sampling/truncated_ratio']:.0%} of the importance weights are truncated, which "
                "biases. Bring the two closer (vllm_dtype, the type the policy is trained in), or shorten completions."
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
        mend = "lower schedule_kl" if self._schedule == "auto" else "take a third of learning_rate, or schedule auto"
        return (
            f"the policy has fallen: the mean reward of the last {PATIENCE} steps is {now:.3f}, and was "
            f"{best:.3f} at its best. Steps are too long: {mend}, and start again or from an earlier checkpoint."
        )

    def _rate_collapsed(self, metrics: dict[str, Any]) -> str:
        factor = metrics["lr_factor"]  # not the rate: a cosine lowers that
        name = "schedule's factor on the learning rate"
        if self._schedule == "auto":  # its factor is to an arbitrary start, and never falls below that of `LEAST`
            n_snr = metrics["n_snr"]
            if n_snr is None or not math.isfinite(n_snr):
                return ""
            factor = max(n_snr / (1 + n_snr), self._floor)
            name = "signal's share of the gradient, which the learning rate follows,"
        self._highest = max(self._highest, factor)
        self._collapsed = self._collapsed + 1 if factor <= COLLAPSED * self._highest else 0
        if self._collapsed < PATIENCE:
            return ""
        critical = metrics["critical_batch_size"]
        known = (
            "" if critical is None or not math.isfinite(critical) else f" (critical batch about {critical:.0f} prompts)"
        )
        return (
            f"the {name} has been at most {COLLAPSED:.0%} of its highest for {PATIENCE} "
            f"steps: the gradient's signal is lost in its noise{known}. Raise prompts_per_step, stop here, or set "
            "schedule_floor to go on regardless."
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
        shrink = "" if self._baseline == "oblr_shrunk" else ", or take the baseline oblr_shrunk"
        return (
            f"baselines of this step's prompts spread {spread / usual:.0f} times as wide as usual "
            f"({spread:.3g} against {usual:.3g}): look at the rewards in completions/ for outliers, clip them{shrink}."
        )
