"""The learning rate that the gradient's signal-to-noise ratio supports: eta_t = eta_0 * factor (OBLR-PO, theorem 4)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo.estimators.moments import Moments

Mode = Literal["debiased", "plugin", "off"]
SCHEDULE_MODES: tuple[Mode, ...] = get_args(Mode)


class SNRSchedule:
    """Scale the learning rate of every step by N SNR / (1 + N SNR).

    The loss bound L(th - eta g) <= L - eta ||grad||^2 + (c/2) eta^2 (||grad||^2 + tr H / N) is least at
    eta = (1/c) N SNR / (1 + N SNR) (theorem 4); the optimizer's own rate eta_0 stands for 1/c. Modes:

    - `debiased` (default): S / (S + T/N) with unbiased S, T; on one batch max(0, 1 - T / (N ||g||^2)).
    - `plugin`, the paper read literally: ||g||^2 for ||grad J||^2. Its N SNR is about 1 too high, so the factor hardly
      ever falls below 1/2: it cannot brake.
    - `off`: factor 1; the moments are still averaged for `smoothed`.

    S and T are averaged over steps separately (exponentially, bias-corrected) and divided last.

    Each `step` reads the rate that the optimizer or any torch scheduler has set (eta_0), sets every group's rate to
    eta_0 * factor, and puts eta_0 back right after `optimizer.step()`, so that schedulers never see the scaled rate.
    Where `optimizer.step()` is left out (a gradient scaler that skips), call `restore()` in its place; save the
    optimizer's state after the step, not before.

    Args:
        optimizer: any torch optimizer.
        mode: see above.
        ema: decay of the averages, in [0, 1); 0 uses each batch alone.
        floor: the least factor.
        ceiling: the greatest factor.
        warmup: over the first `warmup` steps the factor is also scaled by t / warmup.

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
    ) -> None:
        if mode not in SCHEDULE_MODES:
            raise ValueError(f"unknown schedule mode {mode!r}; choose one of: {', '.join(SCHEDULE_MODES)}.")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {ema}.")
        if not 0 <= floor <= ceiling:
            raise ValueError(f"need 0 <= floor <= ceiling, got floor {floor} and ceiling {ceiling}.")
        if warmup < 0:
            raise ValueError(f"warmup is a number of steps, got {warmup}.")
        self.mode, self.ema, self.floor, self.ceiling, self.warmup = mode, ema, floor, ceiling, warmup
        self.optimizer = optimizer
        self.factor = 1.0
        self._steps = 0
        self._signal2 = self._trace_cov = 0.0
        self._n = 0
        self._pending: list[tuple[dict[str, Any], Any, Any]] = []
        optimizer.register_step_post_hook(lambda *_: self.restore())

    @property
    def smoothed(self) -> Moments:
        """The averaged moments, for the latest batch's N.

        Raises:
            ValueError: before the first step.
        """
        correction = 1 - self.ema**self._steps
        if not self._steps:
            raise ValueError("no step has been taken yet.")
        return Moments(self._signal2 / correction, self._trace_cov / correction, self._n)

    @property
    def learning_rates(self) -> list[float]:
        """The rate of every parameter group as it is now: between `step` and `optimizer.step()`, the one used."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, batch: Moments) -> float:
        """Take in a batch's moments, set every group's rate to eta_0 * factor, and return the factor."""
        self._steps += 1
        self._signal2 = self.ema * self._signal2 + (1 - self.ema) * batch.signal2
        self._trace_cov = self.ema * self._trace_cov + (1 - self.ema) * batch.trace_cov
        self._n = batch.n
        self.factor = self._bounded(self._raw_factor())
        self.restore()
        for group in self.optimizer.param_groups:
            eta_0 = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            _set_rate(group, eta_0 * self.factor)
            self._pending.append((group, eta_0, eta_0 * self.factor))
        return self.factor

    def restore(self) -> None:
        """Put eta_0 back in the groups whose rate is still the one set here; `optimizer.step()` does so by itself."""
        for group, eta_0, used in self._pending:
            if bool(group["lr"] == used):
                _set_rate(group, eta_0)
        self._pending = []

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain numbers. The settings are the caller's to give again."""
        return {"steps": self._steps, "signal2": self._signal2, "trace_cov": self._trace_cov, "n": self._n,
                "factor": self.factor}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._steps, self._n, self.factor = state["steps"], state["n"], state["factor"]
        self._signal2, self._trace_cov = state["signal2"], state["trace_cov"]

    def _raw_factor(self) -> float:
        if self.mode == "off":
            return 1.0
        smoothed = self.smoothed
        noise = smoothed.trace_cov / smoothed.n
        signal2 = max(smoothed.signal2, 0.0) if self.mode == "debiased" else max(smoothed.signal2 + noise, 0.0)
        return signal2 / (signal2 + noise) if signal2 > 0 else 0.0

    def _bounded(self, factor: float) -> float:
        if self.mode == "off":
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
