"""The learning rate that the gradient's signal-to-noise ratio supports: eta_t = eta_0 * factor (OBLR-PO, theorem 4)."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo.estimators.averages import Interval, MomentAverage
from oblrpo.estimators.measured_rate import FACTORS, BatchFacts, MeasuredRate, RateSettings
from oblrpo.estimators.measuring import GaugeState, Step, UpdateGauge, mean_kl
from oblrpo.estimators.moments import Moments
from oblrpo.tables.algorithms import SCHEDULES

LEAST_RATE, MOST_RATE = 1e-9, 1.0
"""Bounds on the rate of `KLAdaptive`, wide enough for a language model and for a toy; rsl_rl's are 1e-5 and 1e-2."""
KL_FACTOR = 1.5  # how many times its rate changes after a step that went too far or not far enough
KL_TOLERANCE = 2.0  # a KL between target / KL_TOLERANCE and target * KL_TOLERANCE leaves its rate as it is


class KLAdaptive:
    """The rate falls 1.5 times after a step of more than twice the target KL, and grows so after one of less than half.

    The rule of robot learning's PPO (rsl_rl, rl_games, torchrl), which knows nothing of noise. The first rate is the
    optimizer's own. No step is shortened, and the rate never grows after a step that was not felt. The target is the
    `kl` of the settings, in nats an output.
    """

    def __init__(self, gauge: UpdateGauge, settings: RateSettings) -> None:
        self.gauge, self.target_kl = gauge, settings.kl
        self.rate = self.start = 0.0

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The rate of this update divided by the first."""
        if not self.start:
            self.start = self.rate = self.gauge.first_rate("kl")
        if self.gauge.low_precision:
            self.gauge.hold()
        return self.rate / self.start

    @torch.no_grad()
    def limit_step(self, change: Callable[[], Tensor], used: float | None) -> Step:
        """Measure the update, which stays as it is, and choose the rate of the next one."""
        kl = self.gauge.kl(change, used)
        self.gauge.copies = []
        if kl > KL_TOLERANCE * self.target_kl:
            self.rate = max(self.rate / KL_FACTOR, LEAST_RATE)
        elif 0 < kl < self.target_kl / KL_TOLERANCE:
            self.rate = min(self.rate * KL_FACTOR, MOST_RATE)
        return Step(kl, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain numbers."""
        return {"rate": self.rate, "start": self.start, "gauge": asdict(self.gauge.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.rate, self.start, self.gauge.state = state["rate"], state["start"], GaugeState(**state["gauge"])


MEASURED_RATES: dict[str, Callable[[UpdateGauge, RateSettings], MeasuredRate | KLAdaptive]] = {
    "auto": MeasuredRate,
    "kl": KLAdaptive,
}
"""The schedules that set the rate by how far updates move the policy; `FACTORS` has the others."""


class SNRSchedule:
    """Scale the learning rate of every step by N SNR / (1 + N SNR).

    The loss bound L(th - eta g) <= L - eta ||grad||^2 + (c/2) eta^2 (||grad||^2 + tr H / N) is least at
    eta = (1/c) N SNR / (1 + N SNR) (theorem 4); the optimizer's own rate eta_0 stands for 1/c. There are six modes:

    - `debiased` (default): S / (S + T/N) with unbiased S and T; on one batch that is max(0, 1 - T / (N ||g||^2)).
    - `plugin`, the paper read literally, takes ||g||^2 for ||grad J||^2: it cannot brake.
    - `auto` sets the rate at which a step is as long as the gradients after the last ones say that they should have
      been (`MeasuredRate`); eta_0 is forgotten after the first update. The optimizer gets gradients in units of their
      scale, and what momentum holds is weighted by it.
      Call `limit_step` after every `optimizer.step()`, give `step` the outputs' mean length, and leave the gradient in
      `.grad` for it.
    - `kl` keeps the movement of a step near a set number of nats, whatever the noise (`KLAdaptive`); eta_0 is only
      where it starts. It needs `limit_step`, too.
    - `ess` takes sqrt(ESS / B) alone, the rate of VCPO (arXiv 2602.17616).
    - `off` takes the factor 1; the moments are still averaged for `smoothed`.

    S and T of every batch are divided by the scale of its gradient, averaged over steps, and divided by each other last
    (`MomentAverage`). Off-policy, where `step` gets the effective sample size, all modes but `off` and `kl` are
    multiplied by sqrt(ESS / B), too.

    No signal, no step: a batch without any gradient gets the factor 0 in every mode, and no rate grows by it.

    Each `step` reads the rate that the optimizer or any torch scheduler has set (eta_0), sets every group's rate to
    eta_0 * factor, and puts eta_0 back right after `optimizer.step()`, so that schedulers never see the scaled rate.
    Where `optimizer.step()` is left out (a gradient scaler that skips), call `restore()` in its place; save the
    optimizer's state after the step, not before.

    Args:
        optimizer: any torch optimizer.
        mode: one of those above.
        ema: decay of the longest average, in [0, 1); 0 uses each batch alone. None: 0.97 with `auto`, 0.9 with the
            others. Shorter ones take its place while the ratio moves.
        floor: the least factor of `debiased` and `plugin`.
        ceiling: their greatest factor.
        warmup: over the first `warmup` steps the factor is also scaled by t / warmup.
        kl: the most that a step of `auto` is meant to move the policy, in nats an output; the target of `kl`. None: 0.5
            with `auto`, 0.02 with `kl`.
        growth: how many times the rate of `auto` grows in a step at the most.
        shrinkage: how many times it shrinks at the most.
        updates: how many updates are made on a batch, which `auto` counts as one step.
        low_precision: whether log-probabilities are computed with fewer digits than float32, as in bfloat16. Then
            `auto` and `kl` lengthen an update while they measure it, and hold a second copy of the parameters
            meanwhile.

    Raises:
        ValueError: an unknown mode or a value out of range.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        >>> schedule = SNRSchedule(optimizer)
        >>> factor = schedule.step(Moments(signal2=1.0, trace_cov=24.0, n=8))  # N SNR = 1/3
        >>> f"{factor:.2f} {optimizer.param_groups[0]['lr']:.4f}"
        '0.25 0.0025'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "debiased",
        *,
        ema: float | None = None,
        floor: float = 0.0,
        ceiling: float = 1.0,
        warmup: int = 0,
        kl: float | None = None,
        growth: float = 3.0,
        shrinkage: float = 2.0,
        updates: int = 1,
        low_precision: bool = False,
    ) -> None:
        if mode not in SCHEDULES:
            raise ValueError(f"unknown schedule mode {mode!r}; choose one of: {', '.join(SCHEDULES)}.")
        ema = SCHEDULES[mode].memory if ema is None else ema
        if not 0 <= ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {ema}.")
        if warmup < 0:
            raise ValueError(f"warmup is a number of steps, got {warmup}.")
        kl = SCHEDULES[mode].nats if kl is None else kl
        self.settings = RateSettings(floor, ceiling, kl, growth, shrinkage, updates)
        self.measures_updates = SCHEDULES[mode].measures_updates
        """Whether `limit_step` has to be called after every `optimizer.step()`."""
        self.rule: MeasuredRate | KLAdaptive | None = None
        """What sets the rate where updates are measured."""
        if self.measures_updates:
            self.rule = MEASURED_RATES[mode](UpdateGauge(optimizer, low_precision), self.settings)
        self.mode, self.warmup, self.optimizer = mode, warmup, optimizer
        self.average = MomentAverage(ema)
        self.factor = 1.0
        self._steps = 0
        self._pending: list[tuple[dict[str, Any], Any, Any]] = []
        self._unmeasured: float | None = None  # the rate of an update that was made and not yet confined
        optimizer.register_step_pre_hook(self._starting)
        optimizer.register_step_post_hook(self._stepped)

    @property
    def target_kl(self) -> float:
        """The nats an output that the next update is meant to take; NaN where the schedule has no such aim."""
        return math.nan if self.rule is None else self.rule.target_kl

    @property
    def smoothed(self) -> Moments:
        """The averaged moments, with the N of the latest batch; an error before the first step."""
        return self.average.moments

    def snr_interval(self, z: float = 1.96) -> Interval:
        """An interval for the SNR of the policy as it is now: of 95 % with z = 1.96, by simulation 92 to 98 %.

        With R = sum a S / sum a T, se^2 = n / (n - 1) sum a^2 (S - R T)^2 / (sum a T)^2, with the weights a of the
        average that is taken and n the equal batches that it is worth. It reaches Student's t of n - 1 degrees times
        se to each side, and as far again as the ratio has moved, by the next shorter average, while its batches were
        made. Both bounds are NaN before the third batch with a gradient, and without averages (ema 0).

        Args:
            z: the number of standard errors to each side.
        """
        return self.average.snr_interval(z)

    @property
    def learning_rates(self) -> list[float]:
        """The rate of every parameter group as it is now: between `step` and `optimizer.step()`, the one used."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(
        self,
        batch: Moments | None,
        ess_ratio: float = 1.0,
        mean_length: float | None = None,
        fresh: bool = True,
        headroom: float = math.inf,
    ) -> float:
        """Take in a batch's moments, set every group's rate to eta_0 * factor, and return the factor.

        Args:
            batch: the batch's moments, before any clipping. None where they were not measured: the averages stay what
                they are, and the factor is what they support.
            ess_ratio: ESS / B = (sum rho)^2 / (B sum rho^2) of the importance weights; 1 on-policy.
            mean_length: the mean length of the outputs in tokens; `auto` takes them for single tokens without it.
            fresh: whether no update was made on these outputs before, by whichever policy they were sampled. Only then
                are their moments averaged, and does the gradient, which has to be in `.grad`, tell `auto` how long the
                last step should have been.
            headroom: the most nats an output that a step of `auto` may be meant to take (`headroom` of the rewards).

        Raises:
            ValueError: `auto` or `kl` has no rate to start from, or its last update was not confined; nothing was ever
                measured.
        """
        self.restore()
        if batch is not None and fresh:
            self.average.add(batch)
        self.factor = 0.0
        if batch is None or batch.has_gradient:
            self._steps += 1
            facts = BatchFacts(ess_ratio, mean_length, fresh, headroom, batch is not None)
            if self.rule is None:
                self.factor = FACTORS[self.mode](self.average, facts, self.settings)
            elif self._unmeasured is None:
                self.factor = self.rule.factor(self.average, facts)
            else:
                raise ValueError("the last update was not measured: call `limit_step` after every optimizer.step().")
            self.factor *= min(1.0, self._steps / self.warmup if self.warmup else 1.0)
        for group in self.optimizer.param_groups:
            eta_0 = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            set_rate(group, eta_0 * self.factor)
            self._pending.append((group, eta_0, eta_0 * self.factor))
        return self.factor

    def limit_step(self, change: Callable[[], Tensor]) -> Step:
        """Measure how far `optimizer.step()` has moved the policy; `auto` shortens an update that went too far.

        `auto` and `kl` need it (`measures_updates`); the other modes only measure.

        Args:
            change: () -> log pi after - log pi before of every token of the batch's outputs, (S, T), 0 where there is
                none; of whole outputs, (S,), it is noisier. A subsample of outputs will do. It is called again after
                every change of the update's length. With `low_precision`, `auto` and `kl` take differences of it
                themselves, so that log pi will do for them.

        Raises:
            ValueError: a change is NaN or infinite, or `auto` cannot measure it.
        """
        used, self._unmeasured = self._unmeasured, None
        taken = Step(mean_kl(change()), 1.0) if self.rule is None else self.rule.limit_step(change, used)
        if not math.isfinite(taken.kl):
            raise ValueError("log-probabilities are NaN or infinite after the update.")
        return taken

    def _starting(self, *_: Any) -> None:
        """Put the gradient of a step that was set here in units of its scale, where the rule is one of such steps."""
        if self._pending and isinstance(self.rule, MeasuredRate):
            self.rule.rescale()

    def _stepped(self, *_: Any) -> None:
        """Take note of the rate that `optimizer.step()` was called at, and put eta_0 back."""
        if self.rule is not None:
            if self._unmeasured is not None:
                raise ValueError(
                    "two updates in one step: call `step` before and `limit_step` after each optimizer.step()."
                )
            self._unmeasured = max((float(used) for _, _, used in self._pending), default=None)
        self.restore()

    def restore(self) -> None:
        """Put eta_0 back in the groups whose rate is still the one set here; `optimizer.step()` does so by itself."""
        for group, eta_0, used in self._pending:
            if bool(group["lr"] == used):
                set_rate(group, eta_0)
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain numbers. The settings are the caller's to give again."""
        average, rule = self.average.state_dict(), {} if self.rule is None else self.rule.state_dict()
        return {"factor": self.factor, "steps": self._steps, "average": average, "rule": rule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off; a KeyError where that was another version or mode."""
        if self.rule is not None:
            self.rule.load_state_dict(state["rule"])
        self.average.load_state_dict(state["average"])
        self.factor, self._steps = state["factor"], state["steps"]


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a parameter group's rate in place; compiled and capturable optimizers hold on to the tensor."""
    if isinstance(group["lr"], Tensor):
        with torch.no_grad():
            group["lr"].copy_(rate)
    else:
        group["lr"] = rate
