"""A learning rate with nothing to set: theorem 4's rate with its constant measured along the optimizer's own direction.

Let u be the update at rate 1 (any optimizer's). To second order, and where log pi is locally log-linear,
J(th + eta u) >= J + eta grad J . u - eta^2 osc(F) kappa, kappa = KL(pi_th || pi_th+eta u) / eta^2; the right side is
largest at eta* = grad J . u / (2 osc(F) kappa). Both are measured: the signal grad J . u by the next batch's gradient
times the last update, whose noises are independent; kappa from how far the last update moved the log-probabilities of
the batch's own outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class MeasuredRate:
    """eta* from measured signal and measured KL, followed with bounded changes.

    Cost: a copy of the trained parameters, and whatever forward the caller spends on `observe`.

    Args:
        optimizer: whose `.grad` and parameters are read; its first group's rate is the unit.
        safety: multiplies osc(F). 1 is the bound itself; less is bolder, since the bound takes every direction for the
            worst.
        ema: decay of the averages of signal and kappa.
        growth: most that the rate grows in a step, beyond `free_kl`.
        shrinkage: most that it shrinks.
        free_kl: nats; up to the rate with this predicted KL, growth is not bounded.
    """

    def __init__(
        self, optimizer: Optimizer, safety: float, ema: float, growth: float, shrinkage: float, free_kl: float
    ) -> None:
        self.optimizer, self.safety, self.ema = optimizer, safety, ema
        self.growth, self.shrinkage, self.free_kl = growth, shrinkage, free_kl
        self.rate: float | None = None
        self.signal = self.kappa = self.kl = float("nan")
        self._signal_sum = self._signal_weight = self._kappa_sum = self._kappa_weight = 0.0
        self._used = 0.0  # rate of the update that `_update` holds
        self._update: list[Tensor] | None = None  # between `next_rate` and the step: the old parameters
        self._range = 0.0

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def next_rate(self, start: float) -> float:
        """The rate for this step, before the gradient is clipped and before `optimizer.step()`."""
        if self._update is not None and self._used > 0:
            along = [
                (p.grad.double() * u.double()).sum()
                for p, u in zip(self._parameters, self._update, strict=True)
                if p.grad is not None
            ]
            signal = -float(torch.stack(along).sum()) / self._used  # minus: `.grad` is that of the loss -J
            self._signal_sum = self.ema * self._signal_sum + (1 - self.ema) * signal
            self._signal_weight = self.ema * self._signal_weight + (1 - self.ema)
            self.signal = self._signal_sum / self._signal_weight
        if self.rate is None:
            self.rate = start
        elif self._kappa_weight and self._signal_weight:
            self.rate = self._bounded(self.rate)
        self._update = [p.detach().clone() for p in self._parameters]
        self._used = 0.0  # until the step is made
        return self.rate

    def _bounded(self, rate: float) -> float:
        self.kappa = self._kappa_sum / self._kappa_weight
        if not self.kappa > 0:  # nothing moved
            return rate * self.growth
        best = max(self.signal, 0.0) / (2 * self.safety * max(self._range, 1e-12) * self.kappa)
        highest = max(rate * self.growth, (self.free_kl / self.kappa) ** 0.5)
        return float(min(max(best, rate / self.shrinkage), highest))

    @torch.no_grad()
    def stepped(self, used: float) -> None:
        """After `optimizer.step()` at this rate: the update replaces the old parameters."""
        if self._update is not None:
            for old, p in zip(self._update, self._parameters, strict=True):
                old.sub_(p).neg_()
            self._used = used

    def observe(self, change_S: Tensor, rewards: Tensor) -> float:
        """Take in by how much the last update changed log pi(o|q) of outputs that were sampled before it.

        KL = mean of the squared change / 2, tails clipped at three times the root mean square.

        Args:
            change_S: log pi after - log pi before, nats.
            rewards: F of the batch, for osc(F): the range of all rewards seen.

        Returns:
            The KL in nats.

        Raises:
            ValueError: a change is NaN or infinite.
        """
        change_S = change_S.detach().double()
        if not change_S.isfinite().all():
            raise ValueError("log-probabilities are NaN or infinite after the update.")
        scale = change_S.square().mean().sqrt()
        self.kl = float(change_S.clamp(-3 * scale, 3 * scale).square().mean() / 2)
        self._range = max(self._range, float(rewards.max() - rewards.min()))
        if self._used > 0:
            self._kappa_sum = self.ema * self._kappa_sum + (1 - self.ema) * self.kl / self._used**2
            self._kappa_weight = self.ema * self._kappa_weight + (1 - self.ema)
        return self.kl

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, the last update included."""
        numbers = {key: value for key, value in vars(self).items() if isinstance(value, float)}
        kept = ("safety", "ema", "growth", "shrinkage", "free_kl")
        return {key: value for key, value in numbers.items() if key not in kept} | {
            "update": None if self._update is None else [u.clone() for u in self._update]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        for key, value in state.items():
            if key != "update":
                setattr(self, key, value)
        update = state["update"]
        self._update = None if update is None else [u.to(p) for u, p in zip(update, self._parameters, strict=True)]
