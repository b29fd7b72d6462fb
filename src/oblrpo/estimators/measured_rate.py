"""A learning rate with nothing to set: steps are as long as the next gradient says that they should have been.

Let u be the update at rate 1 (any optimizer's) and kappa = KL(pi_th || pi_th+eta u) / eta^2, measured on the updates
themselves. A step that is meant to move the policy by KL_t nats an output has the rate sqrt(KL_t / kappa), and

    KL_t = T y^2, at most the nats that the user allows,

with T the mean length of the outputs in tokens and y the length in root-nats a token that `Slope` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.measuring import LONGEST, MeasuringRule
from oblrpo.estimators.moments import inner
from oblrpo.estimators.rules import RateSettings, Step, mean_kl
from oblrpo.estimators.slope import Slope

TOO_FAR = 4.0
"""How many times the KL that was meant a step may take."""
FREE = 1e-3
"""The nats a token up to which the rate may grow at once."""
KAPPA_MEMORY = 0.7
"""Decay of the average over updates of how far a unit of rate goes; most steps are shorter than the longest few."""
SHORTEST = 1e-15
"""The part of an update below which it is given up: float32 cannot tell so little from nothing."""
UPDATE = "oblrpo_update"
"""The key under which the optimizer's state, which every checkpoint holds, keeps the last update."""


class MeasuredRate(MeasuringRule):
    """The rate at which the next update is expected to move the policy by KL_t nats; none takes 4 times as many.

    The first rate is the optimizer's own. From one step to the next the rate grows at most `growth` times, beyond the
    rate whose KL is expected to be `FREE` a token, and shrinks at most `shrinkage` times. It changes only on what was
    felt: an update too short to move the measured log-probabilities is lengthened for the measurement until it does,
    and put back; where even that moves nothing, the rate stays.

    Cost: a copy of the trained parameters during the step, the last update in bfloat16 between steps, and whatever
    forward the caller spends on `confine`.

    Args:
        settings: the optimizer whose parameters are held, the most nats that a step is meant to take (`kl`), growth and
            shrinkage.

    Raises:
        ValueError: the optimizer's momentum, or first beta, is above 0.95.
    """

    mode: ClassVar[str] = "auto"
    memory: ClassVar[float] = 0.97  # of signal and noise, which a run reports and the rate does not follow
    keeps: ClassVar[int] = torch.bfloat16.itemsize
    most_momentum: ClassVar[float] = 0.95  # beyond it noise goes one way for so long that it breaks a policy
    numbers: ClassVar[tuple[str, ...]] = (
        *MeasuringRule.numbers, "rate", "_start", "_root_sum", "_root_weight", "_length",
    )  # fmt: skip

    def __init__(self, settings: RateSettings) -> None:
        super().__init__(settings)
        groups = settings.optimizer.param_groups
        momentum = max(group.get("momentum") or group.get("betas", (0,))[0] for group in groups)
        if momentum > self.most_momentum:
            raise ValueError(
                f"schedule 'auto' takes steps one by one, and a momentum of {momentum:g} makes many go the same way: "
                "set momentum, or the first of betas, to 0.9, or another schedule."
            )
        self.rate: float | None = None
        self._start = 0.0
        self._root_sum = self._root_weight = 0.0
        self._length = 0.0  # of the update that the optimizer's state keeps for the next gradient, in root-nats a token
        self._tokens = 1.0  # of an output of the batch at hand
        self.slope = Slope()
        self.target_kl = settings.kl

    @property
    def kappa(self) -> float:
        """The KL per squared rate, whose root is averaged over updates; NaN before the first one that was felt."""
        return (self._root_sum / self._root_weight) ** 2 if self._root_weight else math.nan

    def factor(
        self, average: MomentAverage, ess_ratio: float, mean_length: float | None = None, fresh: bool = True
    ) -> float:
        """The next rate divided by the first."""
        if not self._start:
            self._start = self._first_rate()
        if self._used is not None:
            raise ValueError("the last update was not measured: call `confine` after every optimizer.step().")
        loss = inner(self._taken_updates())  # what it would cost to make the last update once more
        if fresh and self._length:
            self.slope.observe(-loss / self._length, self._length, average.moments.n)
        self._length = 0.0
        self._tokens = mean_length or 1.0
        self.target_kl = ess_ratio * min(self._tokens * self.slope.length**2, self.settings.kl)
        if self.rate is None:
            self.rate = self._start
        elif self._root_weight:
            best = math.sqrt(self.target_kl / self.kappa)
            free = math.sqrt(FREE * self._tokens / self.kappa)
            longest = max(self.rate * self.settings.growth, free)
            self.rate = min(max(best, self.rate / self.settings.shrinkage), longest)
        self._hold()
        self._had_gradient = [p.grad is not None for p in self._parameters]
        return self.rate / self._start

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs but the last update, which the optimizer's state holds."""
        return {**super().state_dict(), "slope": self.slope.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        super().load_state_dict(state)
        self.slope.load_state_dict(state["slope"])

    def stepped(self, used: float | None) -> None:
        """Take note of the rate that `optimizer.step()` was called at."""
        if self._used is not None:
            raise ValueError("two updates in one step: call `step` before and `confine` after each optimizer.step().")
        super().stepped(used)

    @torch.no_grad()
    def confine(self, change: Callable[[], Tensor]) -> Step:
        """Measure the update and shorten it until it moves the policy by at most 4 times the KL that was meant.

        The first one is shortened to what was meant: nobody knew how far the rate goes that a run begins with.
        A step along u at a lower rate is the same update, shorter; the optimizer's own state does not depend on it.

        Raises:
            ValueError: it moves the policy too far however short it is; it has been taken back.
        """
        most = self.target_kl * (TOO_FAR if self._root_weight else 1.0)
        kl, left = self._kl(change, self._used), 1.0
        if not self._used:  # no update of the schedule, or one at a rate of 0: there is nothing to shorten
            self._used, self._before = None, []
            return Step(kl, left)
        while kl > most * (1 + 1e-6):
            shorter = max(0.1, math.sqrt(0.9 * most / kl))
            left = left * shorter if left > SHORTEST else 0.0
            self._scale_update(shorter if left else 0.0)
            if not left:
                self._used = None
                if not kl < math.inf:
                    raise ValueError("log-probabilities are NaN or infinite after the update, and were so before it.")
                raise ValueError(
                    f"log-probabilities change by a KL of {kl:.2g} nats even without an update, so that steps cannot "
                    "be measured: take those before and after it of the same rows, in the same precision, without "
                    "dropout."
                )
            kl = self._kl(change, self._used * left)
        used, self._used = self._used * left, None
        self.rate = None if self.rate is None else self.rate * left
        self._learn(*(kl, used) if kl > 0 or self.settings.rounds else self._lengthened(used, change))
        self._keep_update()
        self._length = used * math.sqrt(self.kappa / self._tokens) if self._root_weight else 0.0
        return Step(kl, left)

    def _keep_update(self) -> None:
        """Leave the update to the optimizer's state, where the next gradient will meet it, in the copy's room."""
        for p, had_gradient in zip(self._parameters, self._had_gradient, strict=True):
            before = self._before.pop(0)
            if had_gradient:  # else the optimizer may not have made a state of its own yet, and would miss that
                self.settings.optimizer.state[p][UPDATE] = (p - before).to(torch.bfloat16)

    def _taken_updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient and the last update of every parameter that has both; the optimizer's state loses the latter."""
        for p in self._parameters:
            update = self.settings.optimizer.state.get(p, {}).pop(UPDATE, None)
            if update is not None and p.grad is not None:
                yield p.grad, update

    def _learn(self, kl: float, used: float) -> None:
        if kl > 0:
            self._root_sum = KAPPA_MEMORY * self._root_sum + (1 - KAPPA_MEMORY) * math.sqrt(kl) / used
            self._root_weight = KAPPA_MEMORY * self._root_weight + (1 - KAPPA_MEMORY)

    def _lengthened(self, used: float, change: Callable[[], Tensor]) -> tuple[float, float]:
        """KL and rate of an update too short to be felt, made ten times longer until it is; a KL of 0 if it never is.

        It is used only before kappa is measured. The parameters are put back to what the update made of them.
        """
        if self._root_weight or not self._is_update():
            return 0.0, used
        longer, kl = 1.0, 0.0
        with self._put_back():
            while kl == 0 and longer < LONGEST:
                longer *= 10
                self._scale_update(10.0)
                kl = mean_kl(change())
        return (kl if kl < math.inf else 0.0), used * longer
