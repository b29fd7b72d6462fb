"""A learning rate with nothing to set: each update may move the policy by delta nats times the signal's share.

Let u be the update at rate 1 (any optimizer's) and kappa = KL(pi_th || pi_th+eta u) / eta^2. Theorem 4's expansion
holds while the policy moves little; its eta_0 = 1/c is taken for the rate at which it just does, eta_0 = sqrt(delta /
kappa), where one update moves the policy by delta nats. The theorem's factor f = N SNR / (1 + N SNR) multiplies a
gradient; u counts as normalised (Adam's by definition, any other's once its length is measured in nats). As
E ||g||^2 = ||grad J||^2 / f, the theorem's step of length f ||g|| / c has length sqrt(f) ||grad J|| / c: for a
normalised update eta = sqrt(f) eta_0, and a step moves the policy by

    KL_t = delta f_t:    the smaller the signal's share of the gradient, the smaller the step.

What this is not: c is not measured, so that without noise (f = 1) steps keep their length and circle an optimum instead
of settling in it; and f is the gradient's, while u may average gradients over steps (momentum), which are less noisy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

LEAST = 1e-3
"""Share of delta that a step may always spend: a policy that stands still measures nothing."""
KAPPA_MEMORY = 0.8
SHORTEST = 1e-15
"""Left of an update that is given up: float32 has long stopped to tell it from none."""


class Step(NamedTuple):
    """What became of an update."""

    kl: float
    """By how much it moved the policy, nats."""
    share: float
    """What is left of the update; 1 unless it would have moved the policy too far."""


class MeasuredRate:
    """The rate at which the next update is expected to move the policy by delta f nats; none moves it by over delta.

    Cost: a copy of the trained parameters during the step, and whatever forward the caller spends on `confine`.

    Args:
        optimizer: whose parameters are held; the highest rate of its groups is the unit.
        kl: delta, nats a completion.
        growth: most that the rate grows in a step, beyond the rate whose KL is expected to be `LEAST` delta.
        shrinkage: most that it shrinks.
    """

    def __init__(self, optimizer: Optimizer, kl: float, growth: float, shrinkage: float) -> None:
        self.optimizer, self.budget, self.growth, self.shrinkage = optimizer, kl, growth, shrinkage
        self.rate: float | None = None
        self._kappa_sum = self._kappa_weight = 0.0
        self._used: float | None = None  # the rate of an update that was made and not yet confined
        self._before: list[Tensor] = []

    @property
    def kappa(self) -> float:
        """KL per squared rate, averaged; NaN before the first measurement."""
        return self._kappa_sum / self._kappa_weight if self._kappa_weight else math.nan

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def next_rate(self, start: float, share: float) -> float:
        """The rate for this step, before `optimizer.step()`.

        Args:
            start: the first rate.
            share: f.

        Raises:
            ValueError: the last update was not confined.
        """
        if self._used is not None:
            raise ValueError("the last update was not measured: call `confine` after every optimizer.step().")
        if self.rate is None:
            self.rate = start
        elif not self._kappa_weight:  # no update could be felt yet
            self.rate *= self.growth
        else:
            best = math.sqrt(max(share, LEAST) * self.budget / self.kappa)
            free = math.sqrt(LEAST * self.budget / self.kappa)
            self.rate = min(max(best, self.rate / self.shrinkage), max(self.rate * self.growth, free))
        self._before = [p.detach().clone() for p in self._parameters]
        return self.rate

    def stepped(self, used: float | None) -> None:
        """After `optimizer.step()` at this rate; None: at one that was not set here.

        Raises:
            ValueError: a second update before the first was confined.
        """
        if self._used is not None:
            raise ValueError("two updates in one step: call `step` before and `confine` after each optimizer.step().")
        self._used = used

    @torch.no_grad()
    def confine(self, change: Callable[[], Tensor]) -> Step:
        """Measure the update and shorten it until it moves the policy by at most delta.

        A step along u at a lower rate is the same update, shorter; the optimizer's own state does not depend on it.

        Raises:
            ValueError: it moves the policy too far however short it is; it has been taken back.
        """
        kl, left = mean_kl(change()), 1.0
        if self._used is None:  # an update without the schedule
            return Step(kl, left)
        while kl > self.budget * (1 + 1e-6):
            shorter = max(0.1, math.sqrt(0.9 * self.budget / kl))
            left = left * shorter if left > SHORTEST else 0.0
            for p, before in zip(self._parameters, self._before, strict=True):
                p.copy_(before + (p - before) * shorter if left else before)
            if not left:
                self._used = None
                raise ValueError(_not_of_the_weights(kl))
            kl = mean_kl(change())
        used, self._used, self._before = self._used * left, None, []
        self.rate = None if self.rate is None else self.rate * left
        if used > 0 and kl > 0:
            self._kappa_sum = KAPPA_MEMORY * self._kappa_sum + (1 - KAPPA_MEMORY) * kl / used**2
            self._kappa_weight = KAPPA_MEMORY * self._kappa_weight + (1 - KAPPA_MEMORY)
        return Step(kl, left)

    _NUMBERS = ("rate", "_kappa_sum", "_kappa_weight")

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain numbers."""
        return {key: getattr(self, key) for key in self._NUMBERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        for key in self._NUMBERS:
            setattr(self, key, state[key])


def mean_kl(change_S: Tensor) -> float:
    """KL(before || after) = mean of the squared change of log pi(o|q) / 2, nats, to second order.

    Outputs are those of the policy before. Tails are clipped at three times the root mean square: a few outputs whose
    log-probability falls by tens say little about the others. Infinite if any change is NaN or infinite.
    """
    change_S = change_S.detach().double()
    if not change_S.isfinite().all():
        return math.inf
    scale = change_S.square().mean().sqrt()
    return float(change_S.clamp(-3 * scale, 3 * scale).square().mean() / 2)


def _not_of_the_weights(kl: float) -> str:
    if kl < math.inf:
        return (
            f"log-probabilities change by a KL of {kl:.2g} nats even without an update, so that steps cannot be "
            "measured: take those before and after it of the same rows, in the same precision, without dropout."
        )
    return "log-probabilities are NaN or infinite after the update, and were so before it."
