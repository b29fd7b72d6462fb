"""The learning rate that the gradient's signal-to-noise ratio supports: eta_t = eta_0 * factor (OBLR-PO, theorem 4)."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo.estimators.auto import MeasuredRate
from oblrpo.estimators.moments import Moments

Mode = Literal["debiased", "plugin", "auto", "ess", "off"]
SCHEDULE_MODES: tuple[Mode, ...] = get_args(Mode)


class Interval(NamedTuple):
    """Of a ratio."""

    low: float
    high: float


class SNRSchedule:
    """Scale the learning rate of every step by N SNR / (1 + N SNR).

    The loss bound L(th - eta g) <= L - eta ||grad||^2 + (c/2) eta^2 (||grad||^2 + tr H / N) is least at
    eta = (1/c) N SNR / (1 + N SNR) (theorem 4); the optimizer's own rate eta_0 stands for 1/c. Modes:

    - `debiased` (default): S / (S + T/N) with unbiased S, T; on one batch max(0, 1 - T / (N ||g||^2)).
    - `plugin`, the paper read literally: ||g||^2 for ||grad J||^2. Its N SNR is about 1 too high, so the factor hardly
      ever falls below 1/2: it cannot brake.
    - `auto`: the rate of theorem 4 with its constant measured (`auto.MeasuredRate`); eta_0 is only where it starts.
      Call `observe` after every `optimizer.step()`.
    - `ess`: sqrt(ESS / B) alone, VCPO's rate (arXiv 2602.17616).
    - `off`: factor 1; the moments are still averaged for `smoothed`.

    S and T are averaged over steps separately (exponentially, bias-corrected) and divided last. Off-policy, where
    `step` is told the effective sample size, all modes but `off` and `auto` are multiplied by sqrt(ESS / B) too.

    Moments of another metric (`Moments.metric`) than before start the averages anew.

    Each `step` reads the rate that the optimizer or any torch scheduler has set (eta_0), sets every group's rate to
    eta_0 * factor, and puts eta_0 back right after `optimizer.step()`, so that schedulers never see the scaled rate.
    Where `optimizer.step()` is left out (a gradient scaler that skips), call `restore()` in its place; save the
    optimizer's state after the step, not before.

    Args:
        optimizer: any torch optimizer.
        mode: see above.
        ema: decay of the averages, in [0, 1); 0 uses each batch alone.
        floor: the least factor of `debiased` and `plugin`.
        ceiling: the greatest.
        warmup: over the first `warmup` steps the factor is also scaled by t / warmup.
        safety: of `auto`, see `MeasuredRate`.
        memory: of `auto`: decay of its own averages, which hold noisier quantities.
        growth: of `auto`: most that its rate grows in a step.
        shrinkage: of `auto`: most that it shrinks.
        free_kl: of `auto`: nats a step up to which growth is not bounded.

    Raises:
        ValueError: an unknown mode or a value out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Mode = "debiased",
        *,
        ema: float = 0.9,
        floor: float = 0.0,
        ceiling: float = 1.0,
        warmup: int = 0,
        safety: float = 0.02,
        memory: float = 0.97,
        growth: float = 1.5,
        shrinkage: float = 1.1,
        free_kl: float = 1e-4,
    ) -> None:
        if mode not in SCHEDULE_MODES:
            raise ValueError(f"unknown schedule mode {mode!r}; choose one of: {', '.join(SCHEDULE_MODES)}.")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {ema}.")
        if not 0 <= floor <= ceiling:
            raise ValueError(f"need 0 <= floor <= ceiling, got floor {floor} and ceiling {ceiling}.")
        if warmup < 0:
            raise ValueError(f"warmup is a number of steps, got {warmup}.")
        if not 0 <= memory < 1:
            raise ValueError(f"memory must lie in [0, 1), got {memory}.")
        if not safety > 0 or not growth > 1 or not shrinkage > 1 or not free_kl >= 0:
            raise ValueError(
                f"need safety > 0, growth > 1, shrinkage > 1 and free_kl >= 0, got {safety}, {growth}, {shrinkage} "
                f"and {free_kl}."
            )
        self.measured = MeasuredRate(optimizer, safety, memory, growth, shrinkage, free_kl) if mode == "auto" else None
        self.mode, self.ema, self.floor, self.ceiling, self.warmup = mode, ema, floor, ceiling, warmup
        self.optimizer = optimizer
        self.factor = 1.0
        self._start = 0.0  # the first eta_0 of `auto`
        self._steps = self._averaged = 0
        self._signal2 = self._trace_cov = self._signal4 = self._weight2 = 0.0
        self._n = 0
        self._metric = "euclidean"
        self._pending: list[tuple[dict[str, Any], Any, Any]] = []
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    _AVERAGES = ("steps", "averaged", "signal2", "signal4", "trace_cov", "weight2", "n", "start", "metric")

    @property
    def smoothed(self) -> Moments:
        """The averaged moments, for the latest batch's N.

        Raises:
            ValueError: before the first step.
        """
        correction = 1 - self.ema**self._averaged
        if not self._steps:
            raise ValueError("no step has been taken yet.")
        return Moments(self._signal2 / correction, self._trace_cov / correction, self._n, self._metric)

    def snr_interval(self, z: float = 1.96) -> Interval:
        """Interval for the averaged SNR: its signal's standard error over the steps in the average, noise as known.

        se^2 = sum_t a_t^2 / (1 - sum_t a_t^2) (sum_t a_t S_t^2 - S^2), a_t the average's weights; the drift of the true
        signal widens it. Both NaN before the third step, and without averages (ema 0).

        Args:
            z: standard errors to each side.
        """
        if self._averaged < 3 or not self.ema:
            return Interval(math.nan, math.nan)
        smoothed = self.smoothed
        correction = 1 - self.ema**self._averaged
        weight2 = self._weight2 / correction**2
        variance = max(self._signal4 / correction - smoothed.signal2**2, 0.0) * weight2 / (1 - weight2)
        bounds = (smoothed.signal2 + sign * z * math.sqrt(variance) for sign in (-1, 1))
        return Interval(*(Moments(bound, smoothed.trace_cov, smoothed.n).snr for bound in bounds))

    @property
    def learning_rates(self) -> list[float]:
        """The rate of every parameter group as it is now: between `step` and `optimizer.step()`, the one used."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, batch: Moments, ess_ratio: float = 1.0) -> float:
        """Take in a batch's moments, set every group's rate to eta_0 * factor, and return the factor.

        Args:
            batch: its moments, before any clipping.
            ess_ratio: ESS / B = (sum rho)^2 / (B sum rho^2) of the importance weights; 1 on-policy.
        """
        self.restore()
        self._average(batch)
        self.factor = self._bounded(self._raw_factor(ess_ratio))
        for group in self.optimizer.param_groups:
            eta_0 = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            _set_rate(group, eta_0 * self.factor)
            self._pending.append((group, eta_0, eta_0 * self.factor))
        return self.factor

    def _average(self, batch: Moments) -> None:
        if batch.metric != self._metric:
            self._averaged = 0
            self._signal2 = self._trace_cov = self._signal4 = self._weight2 = 0.0
        self._steps += 1
        self._averaged += 1
        keep, new = self.ema, 1 - self.ema
        self._signal2 = keep * self._signal2 + new * batch.signal2
        self._signal4 = keep * self._signal4 + new * batch.signal2**2
        self._trace_cov = keep * self._trace_cov + new * batch.trace_cov
        self._weight2 = keep**2 * self._weight2 + new**2
        self._n, self._metric = batch.n, batch.metric

    def observe(self, change_S: Tensor, rewards: Tensor) -> float:
        """After `optimizer.step()`: by how much log pi(o|q) of the batch's outputs (a subsample will do) has changed.

        `auto` needs it; every mode returns the KL of the step, in nats.

        Args:
            change_S: log pi after - log pi before.
            rewards: F of the batch.
        """
        if self.measured is None:
            return float(change_S.detach().double().square().mean() / 2)
        return self.measured.observe(change_S, rewards)

    def _stepped(self) -> None:
        if self.measured is not None and self._pending:
            self.measured.stepped(float(self._pending[0][2]))
        self.restore()

    def restore(self) -> None:
        """Put eta_0 back in the groups whose rate is still the one set here; `optimizer.step()` does so by itself."""
        for group, eta_0, used in self._pending:
            if bool(group["lr"] == used):
                _set_rate(group, eta_0)
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain numbers. The settings are the caller's to give again."""
        state = {"factor": self.factor} | {key: getattr(self, f"_{key}") for key in self._AVERAGES}
        return state | ({} if self.measured is None else {"measured": self.measured.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            KeyError: it is the state of another version or mode.
        """
        self.factor = state["factor"]
        for key in self._AVERAGES:
            setattr(self, f"_{key}", state[key])
        if self.measured is not None:
            self.measured.load_state_dict(state["measured"])

    def _raw_factor(self, ess_ratio: float) -> float:
        if self.mode == "off":
            return 1.0
        if self.measured is not None:
            group = self.optimizer.param_groups[0]
            self._start = self._start or float(group.get("initial_lr", group["lr"]))  # a scheduler may begin at 0
            if not self._start:
                return 1.0  # nothing to start from yet
            return self.measured.next_rate(self._start) / self._start
        return math.sqrt(ess_ratio) * (1.0 if self.mode == "ess" else self._snr_factor())

    def _snr_factor(self) -> float:
        smoothed = self.smoothed
        noise = smoothed.trace_cov / smoothed.n
        signal2 = max(smoothed.signal2, 0.0) if self.mode == "debiased" else max(smoothed.signal2 + noise, 0.0)
        return signal2 / (signal2 + noise) if signal2 > 0 else 0.0

    def _bounded(self, factor: float) -> float:
        if self.mode in {"off", "ess", "auto"}:
            bounded = factor
        else:
            bounded = min(max(factor, self.floor), self.ceiling)
        return bounded * min(1.0, self._steps / self.warmup) if self.warmup else bounded


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):  # compiled and capturable optimizers hold on to the tensor
        with torch.no_grad():
            group["lr"].copy_(rate)
    else:
        group["lr"] = rate
