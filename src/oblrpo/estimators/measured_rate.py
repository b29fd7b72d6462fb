"""A learning rate with nothing to set: steps are as long as the next gradient says that they should have been.

Let u be an update at rate 1 (any optimizer's) and kappa = KL(pi_th || pi_th+eta u) / (T eta^2), measured on the updates
themselves, with T the mean length of the batch's outputs in tokens. A step is meant to move the policy by

    KL_t = T y^2 nats an output, at most the nats that the user allows,

y being the length in root-nats a token that `Slope` finds. Its updates, one or several, are meant to go equal parts of
that way: each has the rate (y - what the step has gone so far) / (updates left) / sqrt(kappa).
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
from oblrpo.estimators.rules import BatchFacts, RateSettings, Step, mean_kl
from oblrpo.estimators.slope import Slope

TOO_FAR = 4.0
"""How many times the KL that was meant a step may take; it never takes more nats than the user allows."""
FREE = 1e-3
"""The nats a token up to which the rate may grow at once, until steps are as long as they are meant."""
NEW, TREND = 0.7, 0.5
"""The weights of the newest update in kappa, and in its trend (Holt's double exponential smoothing)."""
UNFELT = 100.0
"""How many times less than it was meant a step takes that is all but unfelt."""
GONE = 0.1
"""The N SNR below which the signal is gone."""
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
        *MeasuringRule.numbers, "rate", "_start", "_root", "_trend", "_length", "_tokens",
        "_arrived", "_seen", "_over", "_deaf",
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
        self._arrived = self._seen = False  # whether a step was about as long as it was meant; and a signal then
        self._over = False  # whether that signal is gone
        self._deaf = False  # whether the last step was all but unfelt, though earlier ones were
        self._trend = 0.0  # its change from one update to the next, in logarithms
        self._root = 0.0  # the root of kappa; 0 before the first update that was felt
        self._length = 0.0  # of the last step, which the optimizer's state keeps for the next gradient
        self._tokens = 1.0  # of an output of the batch at hand
        self._left = 0  # the updates that are left of this step
        self._gone = 0.0  # the root of the KL that this step has taken so far
        self._change: Tensor | None = None  # the change of log pi that it has made so far
        self._changed: Tensor | None = None  # the same with the update that is measured
        self._aim = 0.0  # the root of the KL that the next update is meant to take
        self.slope = Slope()
        self.target_kl = settings.kl

    @property
    def kappa(self) -> float:
        """The KL a token per squared rate; NaN before the first update that was felt."""
        return self._root**2 if self._root else math.nan

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The next rate divided by the first."""
        if not self._start:
            self._start = self._first_rate()
        if self._used is not None:
            raise ValueError("the last update was not measured: call `confine` after every optimizer.step().")
        if batch.fresh:
            loss = inner(self._taken_updates())  # what it would cost to make the last step once more
            if self._length and average.scale:
                # In units of the batch's own gradient, which may shrink faster than memory forgets.
                slope = -loss / self._length / math.sqrt(average.scale)
                self.slope.observe(slope, self._length, average.moments.n)
            self._length = self._gone = 0.0
            self._change, self._left = None, self.settings.updates
        before, self._tokens = self._tokens, batch.mean_length or 1.0
        meant = min(self._tokens * self.slope.length**2, batch.headroom, self.settings.kl)
        self.target_kl = batch.ess_ratio * meant
        self._aim = max(0.0, math.sqrt(self.target_kl) - self._gone) / max(self._left, 1)
        self._left -= 1
        if self.rate is None:
            self.rate = self._start
        elif self._root:
            root = self._root * math.sqrt(self._tokens) * math.exp(self._trend)
            best = self._aim / root
            longest = self.rate * (1.0 if self._is_gone(average) else self.settings.growth)
            if not self._arrived:
                longest = max(longest, math.sqrt(FREE * self._tokens) / root)
            grown = max(1.0, math.sqrt(self._tokens / before))  # outputs that grow need a lower rate for the same nats
            self.rate = min(max(best, self.rate / self.settings.shrinkage / grown), longest)
        self._hold()
        self._had_gradient = [p.grad is not None for p in self._parameters]
        return self.rate / self._start

    def _is_gone(self, average: MomentAverage) -> bool:
        """Whether there was a signal, seen with steps as long as they were meant, of which nothing is left.

        Noise alone makes a policy ever surer of itself, and a unit of rate goes ever less far: a rate that made up for
        that would never end. Nor would it where all but nothing of a step is felt, by a policy that is sure of all.
        """
        low, high = average.snr_interval(1.96)
        if low > 0:
            self._seen, self._over = self._seen or self._arrived, False
        elif self._seen and high * average.moments.n < GONE:
            self._over = True  # until it is seen again
        return self._deaf or self._over

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs but the last step, which the optimizer's state holds."""
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
        """Measure the update and shorten it until its step takes at most what the user allows and 4 times the KL meant.

        The first one is shortened to what was meant: nobody knew how far the rate goes that a run begins with.
        An update along u at a lower rate is the same update, shorter; the optimizer's own state does not depend on it.

        Raises:
            ValueError: it moves the policy too far however short it is; it has been taken back.
        """
        if not self._used:  # no update of the schedule, or one at a rate of 0: there is nothing to shorten
            used, self._used, self._before = self._used, None, []
            return Step(self._kl(change, used), 1.0)
        most = min(self.target_kl * TOO_FAR, self.settings.kl) if self._root else self._aim**2
        (kl, whole), left = self._taken(change, self._used), 1.0
        while whole > most * (1 + 1e-6):
            room = max(0.0, math.sqrt(0.9 * most) - self._gone)
            shorter = max(0.1, room / (math.sqrt(whole) - self._gone)) if room else 0.0
            left = left * shorter if left > SHORTEST else 0.0
            self._scale_update(shorter if left else 0.0)
            if not left:
                if room:
                    self._refuse(kl)
                kl, whole = 0.0, self._gone**2  # earlier updates of the step went all the way
                break
            kl, whole = self._taken(change, self._used * left)
        used, self._used = self._used * left, None
        self.rate = None if self.rate is None else self.rate * (left or 1.0)
        self._learn(*(kl, used) if kl > 0 or self.settings.rounds or not left else self._lengthened(used, change))
        self._keep_update()
        self._gone, self._change = math.sqrt(whole), self._changed if left else self._change
        alone = self.settings.updates == 1  # then kappa, which averages, knows its length better
        length = used * self._root if alone else self._gone / math.sqrt(self._tokens)
        self._length = length if self._root else 0.0
        self._deaf = self._arrived and whole < self.target_kl / UNFELT
        self._arrived = self._arrived or whole > self.target_kl / 4
        return Step(whole, left)

    def _refuse(self, kl: float) -> None:
        self._used = None
        if not kl < math.inf:
            raise ValueError("log-probabilities are NaN or infinite after the update, and were so before it.")
        raise ValueError(
            f"log-probabilities change by a KL of {kl:.2g} nats even without an update, so that steps cannot be "
            "measured: take those before and after it of the same rows, in the same precision, without dropout."
        )

    def _taken(self, change: Callable[[], Tensor], used: float | None) -> tuple[float, float]:
        """The KL of this update, and of the step with it; where log pi rounds, as if all its updates went one way."""
        if self.settings.rounds:
            kl = self._kl(change, used)
            return kl, (self._gone + math.sqrt(kl)) ** 2
        change_ST = change()
        self._changed = change_ST if self._change is None else self._change + change_ST
        return mean_kl(change_ST), mean_kl(self._changed)

    def _keep_update(self) -> None:
        """Leave the step to the optimizer's state, where the next gradient will meet it, in the copy's room."""
        for p, had_gradient in zip(self._parameters, self._had_gradient, strict=True):
            before = self._before.pop(0)
            if had_gradient:  # else the optimizer may not have made a state of its own yet, and would miss that
                state = self.settings.optimizer.state[p]
                update = p - before
                state[UPDATE] = (update + state[UPDATE] if UPDATE in state else update).to(torch.bfloat16)

    def _taken_updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient and the last step of every parameter that has both; the optimizer's state loses the latter."""
        for p in self._parameters:
            update = self.settings.optimizer.state.get(p, {}).pop(UPDATE, None)
            if update is not None and p.grad is not None:
                yield p.grad, update

    def _learn(self, kl: float, used: float) -> None:
        if kl > 0:
            root = math.sqrt(kl / self._tokens) / used
            predicted = self._root * math.exp(self._trend) if self._root else root
            level = predicted * (root / predicted) ** NEW
            self._trend += TREND * (math.log(level / self._root) - self._trend) if self._root else 0.0
            self._root = level

    def _lengthened(self, used: float, change: Callable[[], Tensor]) -> tuple[float, float]:
        """KL and rate of an update too short to be felt, made ten times longer until it is; a KL of 0 if it never is.

        It is used only before kappa is measured. The parameters are put back to what the update made of them.
        """
        if self._root or not self._is_update():
            return 0.0, used
        longer, kl = 1.0, 0.0
        with self._put_back():
            while kl == 0 and longer < LONGEST:
                longer *= 10
                self._scale_update(10.0)
                kl = mean_kl(change())
        return (kl if kl < math.inf else 0.0), used * longer
