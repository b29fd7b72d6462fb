"""A learning rate with nothing to set: each update may move the policy by delta nats times the signal's share.

Let u be the update at rate 1 (any optimizer's) and kappa = KL(pi_th || pi_th+eta u) / eta^2. Theorem 4's expansion
holds while the policy moves little. Its eta_0 = 1/c is taken for the rate at which it just does, eta_0 = sqrt(delta /
kappa), where one update moves the policy by delta nats. The theorem's factor f = N SNR / (1 + N SNR) multiplies a
gradient, while u counts as normalised (Adam's by definition, any other's once its length is measured in nats). As
E ||g||^2 = ||grad J||^2 / f, the theorem's step of length f ||g|| / c has length sqrt(f) ||grad J|| / c. For a
normalised update that is eta = sqrt(f) eta_0, and a step moves the policy by

    KL_t = delta f_t:    the smaller the signal's share of the gradient, the smaller the step.

f is unknown, too: in small batches the estimate of the signal is as often below 0 as above. Cut at 0, it would stop the
policy for want of evidence. f is therefore formed from the signal that is to be expected given its estimate and the
estimate's error (`MomentAverage.expected_share`).

With delta = 1/2 the log-probability of an output changes by 1 (root mean square) in a step without noise, which is
about where the expansion ends. Where J bends more sharply than the KL says, steps overshoot; a brake on the rate sees
that in the next gradient (`overshoot`). One limit remains: f is the gradient's, while u may average gradients over
steps (momentum), which are less noisy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.overshoot import Brake, slope_left
from oblrpo.estimators.rules import RateSettings, Rule, Step, first_rate, mean_kl, sets_its_own_rate

LEAST = 1e-3
"""The share of delta that a step may always spend unless braked: a policy that stands still measures nothing."""
KAPPA_MEMORY = 0.8
SHORTEST = 1e-15
"""The part of an update below which it is given up: float32 cannot tell so little from nothing."""
LONGEST = 1e15
"""How many times an update is lengthened at the most to feel what it does."""


class MeasuredRate(Rule):
    """The rate at which the next update is expected to move the policy by delta f nats; no update moves it by more.

    The first rate is the optimizer's own. From one step to the next the rate grows at most `growth` times, beyond the
    rate whose KL is expected to be `LEAST` delta, and shrinks at most `shrinkage` times. It changes only on what was
    felt: an update too short to move the measured log-probabilities is lengthened for the measurement until it does,
    and put back; where even that moves nothing, the rate stays. A brake shortens steps that overshoot, with optimizers
    that keep an average of gradients (`overshoot.slope_left`).

    Cost: a copy of the trained parameters during the step, and whatever forward the caller spends on `confine`.

    Args:
        settings: the optimizer whose parameters are held, delta (`kl`), growth, shrinkage, and bounds on f.
    """

    memory: ClassVar[float] = 0.97  # a rate that is followed from step to step wants a steady share
    measures_updates: ClassVar[bool] = True
    watched: ClassVar[str] = "signal's share of the gradient, which the learning rate follows,"
    to_shorten: ClassVar[str] = "lower schedule_kl"
    numbers: ClassVar[tuple[str, ...]] = ("rate", "_start", "_kappa_sum", "_kappa_weight")

    def __init__(self, settings: RateSettings) -> None:
        super().__init__(settings)
        self.rate: float | None = None
        self._start = 0.0
        self._kappa_sum = self._kappa_weight = 0.0
        self.brake = Brake()
        self._used: float | None = None  # the rate of an update that was made and not yet confined
        self._before: list[Tensor] = []

    @classmethod
    def refusal(cls, optimizer: str, learning_rate: float) -> str:
        """Why the rule cannot work, or empty: the optimizer has a rate of its own, or the rate to start from is 0."""
        return sets_its_own_rate("auto", optimizer, learning_rate)

    @classmethod
    def share_in(cls, metrics: dict[str, Any], floor: float) -> float:
        """The share f, which `lr_factor` cannot tell: it is relative to an arbitrary start, and bounded by `LEAST`."""
        n_snr = metrics["n_snr"]
        return math.nan if n_snr is None else max(n_snr / (1 + n_snr), floor)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs of the rule, as plain numbers."""
        return super().state_dict() | {"brake": dict(vars(self.brake))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            KeyError: the state is that of another rule, or of a version before the brake.
        """
        super().load_state_dict(state)
        vars(self.brake).update(state["brake"])

    @property
    def metrics(self) -> dict[str, float]:
        """`lr_brake`: what the brake leaves of the rate; it is 1 while no step overshoots."""
        return {"lr_brake": self.brake.factor}

    @property
    def kappa(self) -> float:
        """The KL per squared rate, averaged over updates; NaN before the first one that was felt."""
        return self._kappa_sum / self._kappa_weight if self._kappa_weight else math.nan

    def factor(self, average: MomentAverage, ess_ratio: float, mean_length: float | None = None) -> float:
        """The next rate divided by the first.

        Raises:
            ValueError: there is no rate to start from, or the last update was not confined.
        """
        if not self._start:
            self._start = first_rate("auto", self.settings.optimizer)
        return self._next_rate(self._within_bounds(average.expected_share * ess_ratio)) / self._start

    def _next_rate(self, share: float) -> float:
        if self._used is not None:
            raise ValueError("the last update was not measured: call `confine` after every optimizer.step().")
        brake = self.brake.feel(slope_left(self.settings.optimizer))
        if self.rate is None:
            self.rate = self._start
        elif self._kappa_weight:
            best = brake * math.sqrt(max(share, LEAST) * self.settings.kl / self.kappa)
            free = math.sqrt(LEAST * self.settings.kl / self.kappa)
            longest = max(self.rate * self.settings.growth, free)
            self.rate = min(max(best, self.rate / self.settings.shrinkage), longest)
        self._before = [p.detach().clone() for p in self._parameters]
        return self.rate

    def stepped(self, used: float | None) -> None:
        """Take note of the rate that `optimizer.step()` was called at.

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
        kl, left, delta = mean_kl(change()), 1.0, self.settings.kl
        if not self._used:  # no update of the schedule, or one at a rate of 0: there is nothing to shorten
            self._used, self._before = None, []
            return Step(kl, left)
        while kl > delta * (1 + 1e-6):
            shorter = max(0.1, math.sqrt(0.9 * delta / kl))
            left = left * shorter if left > SHORTEST else 0.0
            self._scale_update(shorter if left else 0.0)
            if not left:
                self._used = None
                raise ValueError(_not_of_the_weights(kl))
            kl = mean_kl(change())
        used, self._used = self._used * left, None
        self.rate = None if self.rate is None else self.rate * left
        self._learn(*(kl, used) if kl > 0 else self._lengthened(used, change))
        self._before = []
        return Step(kl, left)

    def _learn(self, kl: float, used: float) -> None:
        if kl > 0:
            self._kappa_sum = KAPPA_MEMORY * self._kappa_sum + (1 - KAPPA_MEMORY) * kl / used**2
            self._kappa_weight = KAPPA_MEMORY * self._kappa_weight + (1 - KAPPA_MEMORY)

    def _lengthened(self, used: float, change: Callable[[], Tensor]) -> tuple[float, float]:
        """KL and rate of an update too short to be felt, made ten times longer until it is; a KL of 0 if it never is.

        It is used only while nothing is known of kappa. The parameters are put back to what the update made of them.
        """
        if self._kappa_weight or not any((p != b).any() for p, b in zip(self._parameters, self._before, strict=True)):
            return 0.0, used
        made, longer, kl = [p.detach().clone() for p in self._parameters], 1.0, 0.0
        try:
            while kl == 0 and longer < LONGEST:
                longer *= 10
                self._scale_update(10.0)
                kl = mean_kl(change())
        finally:
            for p, kept in zip(self._parameters, made, strict=True):
                p.copy_(kept)
        return (kl if kl < math.inf else 0.0), used * longer

    def _scale_update(self, scale: float) -> None:
        for p, before in zip(self._parameters, self._before, strict=True):
            p.copy_(before + (p - before) * scale if scale else before)

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.settings.optimizer.param_groups for p in group["params"]]


def _not_of_the_weights(kl: float) -> str:
    if kl < math.inf:
        return (
            f"log-probabilities change by a KL of {kl:.2g} nats even without an update, so that steps cannot be "
            "measured: take those before and after it of the same rows, in the same precision, without dropout."
        )
    return "log-probabilities are NaN or infinite after the update, and were so before it."
