"""A learning rate with nothing to set: steps are as long as the next gradient says that they should have been.

Let u be an update at rate 1 (any optimizer's) and kappa = KL(pi_th || pi_th+eta u) / (T eta^2), measured on the updates
themselves, with T the mean length of the batch's outputs in tokens. A step is meant to move the policy by

    KL_t = T y^2 nats an output, at most the nats that the user allows,

y being the length in root-nats a token that `Slope` finds. Its updates, one or several, are meant to go equal parts of
that way: each has the rate (y - what the step has gone so far) / (updates left) / sqrt(kappa).

The optimizer gets gradients in units of their scale, g / sqrt(c), c following |S| + T: a batch whose gradient is a
thousand times as large makes no longer step than others, and leaves no larger trace in the optimizer's averages.
Of unbiased estimates of one gradient the mean with weights 1 / variance is best, and the variance goes as c. So the
weight in momentum of what is older than a batch is also multiplied by min(1, sqrt(c / c before)): where gradients
shrink, because the task has changed or is solved, old ones do not drown the new. It is never raised: a gradient that
grows may have moved.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.measuring import LONGEST, GaugeState, Step, UpdateGauge, mean_kl
from oblrpo.estimators.moments import inner, squared_norm

MEMORY = 320.0  # how many prompts the means reach back
FEWEST = 5.0  # how many batches they reach back at the least
FIRST = 0.1  # the step that is taken for right while nothing is known: root-nats a token, 0.01 nats
BELIEF = 48.0  # how many prompts that counts for
UNSEEN = 1.0  # after how many batches half of the mean slope's square is taken off when noise is estimated
OUTLIER = 4.0
"""How many standard deviations a slope counts for at the most: one batch must not make noise of all that follow."""
LEAST = 0.01  # the shortest step; noise would wander below it


@dataclass
class Slope:
    """The length of the next step, from what the last ones would have gained had they been longer.

    Let an update d move the policy by y = sqrt(KL / T) root-nats a token. Along it the gain in J is A y - C y^2 / 2, so
    that a step of A / C is best; theorem 4 bounds C by an unknown constant. What can be seen is the slope at the
    end of the step. The next batch has other prompts, so that its gradient g of J is unbiased where d has ended, and

        r = g'd / y,  E[r] = A - C y.

    With J of curvature c and a gradient of signal S and noise T / N, g'd is eta (S - eta c (S + T/N)) in the mean,
    which is 0 at theorem 4's eta = (1/c) S / (S + T / N), whatever c, S and T are.

    A step that is best by itself is too long for a run: what its noise breaks, later steps have to repair. How much
    that is can be bounded. Averaged over a noise n, an update changes J by E[F sum_t m_t] / 2, where m_t is the
    part of token t. Its mean is 0 whatever came before, so that tokens with orthogonal scores add up as sqrt(T),
    and noise costs up to a constant times sd(F) sqrt(T) y^2. The noise s that one prompt puts into r is sd(F)
    sqrt(2 T / G) for G outputs a prompt: up to a constant the same. So C is taken to be greater by s, and the step
    is A / (C + s). It is found by iteration,

        y  <-  (mean of y + (mean of r) / s) / 2,  whose fixed point has r = s y, or A - C y = s y.

    `length` is in root-nats a token, sqrt(KL / T). In units of s, the noise of one prompt, the means of r weigh as many
    prompts as they are of, beside `BELIEF` prompts that say `FIRST`. The fields are sums that forget; with them a run
    resumes.
    """

    prompts: float = 0.0
    gain: float = 0.0
    square: float = 0.0
    lengths: float = 0.0
    batches: float = 0.0
    seen: float = 0.0

    def observe(self, slope: float, length: float, P: float) -> None:
        """Take in the slope r at the end of a step of this length, by the gradient of the P prompts after it."""
        keep = math.exp(-1 / max(MEMORY / P, FEWEST))
        if self.batches > 2:  # else two alike would bound all that follow
            bound = OUTLIER * max(self.noise, abs(self.gain / self.prompts) * math.sqrt(P)) / math.sqrt(P)
            slope = min(max(slope, -bound), bound) if bound else slope
        self.seen += 1
        self.batches = keep * self.batches + 1
        self.prompts = keep * self.prompts + P
        self.gain = keep * self.gain + P * slope
        self.square = keep * self.square + (P * slope) ** 2
        self.lengths = keep * self.lengths + P * length

    @property
    def noise(self) -> float:
        """s, the standard deviation of the slope that one prompt shows; 0 before the first one.

        The mean of few slopes is not known: only the share n / (n + `UNSEEN`) of its square is taken off, n being all
        the batches that were ever seen, so that two slopes that are alike by chance do not look like certainty.
        """
        if not self.prompts:
            return 0.0
        mean, P = self.gain / self.prompts, self.prompts / self.batches
        known = self.seen / (self.seen + UNSEEN)
        among = self.batches / (self.batches - known)  # whatever is known, noise alone comes out as it is
        return math.sqrt(max(0.0, self.square / self.prompts - known * P * mean**2) * among)

    @property
    def length(self) -> float:
        """The length of the next step in root-nats a token."""
        noise = self.noise
        slopes = self.gain / noise if noise else 0.0
        return max(LEAST, (BELIEF * FIRST + (self.lengths + slopes) / 2) / (BELIEF + self.prompts))


@dataclass(frozen=True)
class RateSettings:
    """The settings of all schedules; each reads those that concern it (`SNRSchedule`).

    Raises:
        ValueError: a value is out of range.
    """

    floor: float = 0.0
    ceiling: float = 1.0
    kl: float = 0.5
    growth: float = 3.0
    shrinkage: float = 2.0
    updates: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.ceiling:
            raise ValueError(f"need 0 <= floor <= ceiling, got floor {self.floor} and ceiling {self.ceiling}.")
        if not 0 < self.kl < math.inf or not self.growth > 1 or not self.shrinkage > 1:
            given = f"{self.kl}, {self.growth} and {self.shrinkage}"
            raise ValueError(f"need kl > 0, growth > 1 and shrinkage > 1, got {given}.")


class BatchFacts(NamedTuple):
    """What a schedule may know of the batch whose update comes next, beside its signal and noise."""

    ess_ratio: float = 1.0  # the effective sample size of its importance weights over its size; 1 on-policy
    mean_length: float | None = None  # the mean length of its outputs in tokens, if the caller has it
    fresh: bool = True  # whether no update was made on it before
    headroom: float = math.inf
    """The least nats an output that could earn all that is left to earn (`headroom`)."""
    measured: bool = True
    """Whether its signal and noise were measured, so that the averages' last batch is this one."""


def share_of_signal(average: MomentAverage, batch: BatchFacts, settings: RateSettings, debiased: bool = True) -> float:
    """Theorem 4's S / (S + T/N) with unbiased S and T, cut at 0: it can brake down to nothing.

    Not `debiased`, it has ||g||^2 for ||grad J||^2, the paper read literally: its N SNR is then about 1 too high, so
    that the factor hardly ever falls below 1/2.
    """
    share = average.signal_share(debiased)
    return min(max(share * math.sqrt(batch.ess_ratio), settings.floor), settings.ceiling)


FACTORS: dict[str, Callable[[MomentAverage, BatchFacts, RateSettings], float]] = {
    "debiased": share_of_signal,
    "plugin": partial(share_of_signal, debiased=False),
    "ess": lambda average, batch, settings: math.sqrt(batch.ess_ratio),  # the rate of VCPO (arXiv 2602.17616)
    "off": lambda average, batch, settings: 1.0,
}
"""The schedules whose factor depends on nothing but averages, batch and settings."""


TOO_FAR = 4.0
"""How many times the KL that was meant a step may take; it never takes more nats than the user allows."""
BEGIN = 1e-3  # the nats a token of a run's first step, whatever rate it begins with
NEW, TREND = 0.7, 0.5
"""The weights of the newest update in kappa, and in its trend (Holt's double exponential smoothing)."""
STABLE = 3.0
"""How many times a batch's scale may differ from what earlier batches predicted; beyond it, it is the batch's own."""
SCALE_MEMORY = 0.7  # decay of the scale that earlier batches predict
UNFELT = 100.0  # how many times less than it was meant a step takes that is all but unfelt
MOMENTA = ("exp_avg", "momentum_buffer")
"""The names of averages of gradients in the state of torch's optimizers."""
LEAST_N_SNR = 0.1  # the N SNR below which no signal is left
LONGER = 1e3  # how many times a first update is lengthened at once
SHORTEST = 1e-15
"""The part of an update below which it is given up: float32 cannot tell so little from nothing."""
MOST_MOMENTUM = 0.95  # beyond it noise goes one way for so long that it breaks a policy
UPDATE = "oblrpo_update"
"""The key under which the optimizer's state, which every checkpoint holds, keeps the last update."""


@dataclass
class RateState:
    """What the measured rate remembers between steps, beside slope and gauge; plain numbers, with which a run resumes.

    The last update itself is in the optimizer's state.
    """

    rate: float = 0.0  # the rate of the last update; 0 before the first
    felt_rate: float = 0.0  # the highest rate of a step that was felt
    felt_unit: float = 0.0
    """The smallest scale in which the optimizer got the gradient of one; 0 before the first."""
    start: float = 0.0  # the rate that a run began with
    root_kappa: float = 0.0  # the root of kappa; 0 before the first update that was felt
    trend: float = 0.0  # its change from one update to the next, in logarithms
    length: float = 0.0
    """The length of the last step, which the optimizer's state keeps for the next gradient."""
    tokens: float = 1.0  # the tokens of an output of the last batch
    scale: float = 0.0  # the scale of squared gradients that the batches so far predict; 0 before the first
    first_unit: float = 0.0  # the scale of the first batch's squared gradient; 0 before it
    unit: float = 0.0  # the scale in which the optimizer got the last gradient
    arrived: bool = False  # whether a step was ever about as long as it was meant
    unfelt: bool = False  # whether the last step was all but unfelt, though earlier ones were not
    signal_seen: bool = False  # whether a signal was seen since steps are as long as they are meant
    signal_over: bool = False  # whether nothing is left of that signal


class MeasuredRate:
    """The rate at which the next update is expected to move the policy by KL_t nats; none takes 4 times as many.

    The first update is made at the optimizer's own rate, and then lengthened or shortened to `BEGIN` nats a token.
    From one step to the next the rate grows at most `growth` times, and shrinks at most `shrinkage` times. It changes
    only on what was felt: where even a lengthened update moves nothing, the rate stays.

    Cost: a copy of the trained parameters during the step, the last update in bfloat16 between steps, and whatever
    forward the caller spends on `limit_step`.

    Args:
        gauge: measures the updates, and holds the parameters.
        settings: the most nats that a step is meant to take (`kl`), growth, shrinkage and updates.
        slope: finds the length of the next step; None: a new `Slope`.
        most_momentum: the most that the optimizer's momentum, or first beta, may be.

    Raises:
        ValueError: it is more.
    """

    def __init__(
        self,
        gauge: UpdateGauge,
        settings: RateSettings,
        slope: Slope | None = None,
        most_momentum: float = MOST_MOMENTUM,
    ) -> None:
        groups = gauge.optimizer.param_groups
        momentum = max(group.get("momentum") or group.get("betas", (0,))[0] for group in groups)
        if momentum > most_momentum:
            raise ValueError(
                f"schedule 'auto' measures single steps, and a momentum of {momentum:g} makes many go the same way: "
                "set momentum, or the first of betas, to 0.9, or use another schedule."
            )
        self.gauge, self.settings, self.slope, self.state = gauge, settings, slope or Slope(), RateState()
        self.target_kl = settings.kl
        # Of the step at hand:
        self._unit = 1.0  # the scale in which the optimizer is to get the batch's gradient
        self._updates_left = 0
        self._aim = 0.0  # the root of the KL that the next update is meant to take
        self._moved = 0.0  # the root of the KL that the step has taken so far
        self._change: Tensor | None = None  # the change of log pi that it has made so far
        self._changed: Tensor | None = None  # the same with the update that is measured

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The next rate divided by the first."""
        state, settings = self.state, self.settings
        if batch.fresh:
            if own := average.scale if batch.measured else average.scale_of(squared_norm(self.gauge.parameters)):
                scale = min(max(state.scale or own, own / STABLE), own * STABLE)  # hardly ever chosen by the batch
                state.scale = SCALE_MEMORY * scale + (1 - SCALE_MEMORY) * own
                loss = inner(self._gradients_and_updates())  # what it would cost to make the last step once more
                if state.length:
                    # In units of the batch's own gradient, which may shrink faster than memory forgets.
                    self.slope.observe(-loss / state.length / math.sqrt(scale), state.length, average.moments.n)
                # A policy that is sure of all has next to no gradient, and would be moved by one made large again.
                self._unit = max(scale, state.felt_unit if self._is_over(average) or state.unfelt else 0.0)
            state.length = self._moved = 0.0
            self._change, self._updates_left = None, settings.updates
        before, state.tokens = state.tokens, batch.mean_length or 1.0
        meant = min(state.tokens * self.slope.length**2, batch.headroom, settings.kl)
        self.target_kl = batch.ess_ratio * meant
        self._aim = max(0.0, math.sqrt(self.target_kl) - self._moved) / max(self._updates_left, 1)
        self._updates_left -= 1
        if not state.root_kappa:
            self._aim = min(self._aim, math.sqrt(BEGIN * state.tokens))
        if not state.start:
            state.start = state.rate = self.gauge.first_rate("auto")
        elif state.root_kappa:
            root = state.root_kappa * math.sqrt(state.tokens) * math.exp(state.trend)
            longest = state.rate * settings.growth
            if state.unfelt or state.signal_over:
                highest = state.felt_rate / (math.sqrt(UNFELT) if state.unfelt else 1.0)
                longest = max(state.rate, min(longest, highest))
            grown = max(1.0, math.sqrt(state.tokens / before))  # outputs that grow need a lower rate for the same nats
            state.rate = min(max(self._aim / root, state.rate / settings.shrinkage / grown), longest)
        self.gauge.hold()
        return state.rate / state.start

    @torch.no_grad()
    def rescale(self) -> None:
        """Put gradients, which clipping has seen as they were, in units of their scale; and what momentum holds."""
        state, unit = self.state, self._unit
        state.first_unit = state.first_unit or unit  # the size of numbers stays that of the first gradient
        older = math.sqrt(unit / state.unit) if state.unit else 1.0
        for p in self.gauge.parameters:
            if p.grad is not None:
                p.grad.mul_(math.sqrt(state.first_unit / unit))
            for name in MOMENTA if older < 1 else ():
                if (momentum := self.gauge.optimizer.state.get(p, {}).get(name)) is not None:
                    momentum.mul_(older)
        state.unit = unit

    def _gradients_and_updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient and the last step of every parameter that has both; the optimizer's state loses the latter."""
        for p in self.gauge.parameters:
            update = self.gauge.optimizer.state.get(p, {}).pop(UPDATE, None)
            if update is not None and p.grad is not None:
                yield p.grad, update

    def _is_over(self, average: MomentAverage) -> bool:
        """Whether nothing is left of a signal that was seen since steps are as long as they are meant.

        Noise alone makes a policy ever surer of itself, and a unit of rate goes ever less far: a rate that made up for
        that would never end. Nor would it where all but nothing of a step is felt, by a policy that is sure of all. So
        the rate is then no higher than that of a step that was felt was; of a step that is not felt, as KL goes as the
        square of the rate, no higher than a tenth of it, for what a low rate does says nothing of the policy.
        """
        low, high = average.snr_interval(1.96)
        state = self.state
        if low > 0:
            state.signal_seen, state.signal_over = state.signal_seen or state.arrived, False
        elif state.signal_seen and high * average.moments.n < LEAST_N_SNR:
            state.signal_over = True  # until it is seen again
        return state.signal_over

    @torch.no_grad()
    def limit_step(self, change: Callable[[], Tensor], used: float | None) -> Step:
        """Measure the update and shorten it until its step takes at most what the user allows and 4 times the KL meant.

        The first one is made as long as it was meant, for how far a run's first rate goes was not known; where a
        scheduler has lowered that rate, as much shorter. An update along u at a lower rate is the same update, shorter;
        the optimizer's own state does not depend on it.

        `change` is that of `SNRSchedule.limit_step`, `used` the rate that the update was made at; None: one that the
        schedule did not set.

        Raises:
            ValueError: it moves the policy too far however short it is; it has been taken back.
        """
        state, gauge, settings = self.state, self.gauge, self.settings
        if not used:  # there is nothing to shorten
            gauge.copies = []
            return Step(gauge.kl(change, used), 1.0)
        most = min(self.target_kl * TOO_FAR, settings.kl) if state.root_kappa else self._aim**2
        (kl, total), left = self._taken(change, used), 1.0
        least = 0.0 if state.root_kappa or not gauge.is_update() else most / 4 * min(1.0, used / state.rate) ** 2
        while total < least:
            longer = min(math.sqrt(4 * least / total), LONGER) if total else LONGER
            if left > LONGEST:  # nothing is felt of it
                longer, least = 1 / left, 0.0
            left *= longer
            gauge.scale_update(longer)
            kl, total = self._taken(change, used * left)
        while total > most * (1 + 1e-6):
            room = max(0.0, math.sqrt(0.9 * most) - self._moved)
            shorter = max(0.1, room / (math.sqrt(total) - self._moved)) if room else 0.0
            left = left * shorter if left > SHORTEST else 0.0
            gauge.scale_update(shorter if left else 0.0)
            if not left:
                if room and not kl < math.inf:
                    raise ValueError("log-probabilities are NaN or infinite after the update.")
                if room:
                    raise ValueError(
                        f"log-probabilities change by a KL of {kl:.2g} nats even without an update, so that steps "
                        "cannot be measured: take those before and after it of the same rows, in the same precision, "
                        "without dropout."
                    )
                kl, total = 0.0, self._moved**2  # earlier updates of the step went all the way
                break
            kl, total = self._taken(change, used * left)
        used, state.rate = used * left, state.rate * (left or 1.0)
        if kl > 0:  # else it was not felt
            root = math.sqrt(kl / state.tokens) / used
            predicted = state.root_kappa * math.exp(state.trend) if state.root_kappa else root
            level = predicted * (root / predicted) ** NEW
            state.trend += TREND * (math.log(level / state.root_kappa) - state.trend) if state.root_kappa else 0.0
            state.root_kappa = level
        while gauge.copies:  # the step goes to the optimizer's state, where the next gradient meets it, in their room
            p, before, had_gradient = gauge.copies.pop(0)
            if had_gradient:  # else the optimizer may not have made a state of its own yet, and would miss that
                update, own = p - before, gauge.optimizer.state[p]
                own[UPDATE] = (update + own[UPDATE] if UPDATE in own else update).to(torch.bfloat16)
        self._moved, self._change = math.sqrt(total), self._changed if left else self._change
        alone = settings.updates == 1  # then kappa, which averages, knows its length better
        length = used * state.root_kappa if alone else self._moved / math.sqrt(state.tokens)
        state.length = length if state.root_kappa else 0.0
        state.unfelt = state.arrived and total < self.target_kl / UNFELT
        if not state.unfelt:
            state.felt_rate = max(state.felt_rate, state.rate)
            state.felt_unit = min(state.felt_unit or state.unit, state.unit)
        state.arrived = state.arrived or total > self.target_kl / 4
        return Step(total, left)

    def _taken(self, change: Callable[[], Tensor], used: float) -> tuple[float, float]:
        """The KL of this update, and of the step with it; where log pi rounds, as if all its updates went one way."""
        if self.gauge.low_precision:
            kl = self.gauge.kl(change, used)
            return kl, (self._moved + math.sqrt(kl)) ** 2
        change_ST = change()
        self._changed = change_ST if self._change is None else self._change + change_ST
        return mean_kl(change_ST), mean_kl(self._changed)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs but the last step, which the optimizer's state holds."""
        return {"state": asdict(self.state), "slope": asdict(self.slope), "gauge": asdict(self.gauge.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.state, self.gauge.state = RateState(**state["state"]), GaugeState(**state["gauge"])
        self.slope = Slope(**state["slope"])
