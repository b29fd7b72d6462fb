"""Rules that turn a gradient's signal and noise into a factor on the learning rate: one small class each.

`schedule.RULES` names them for `SNRSchedule`; those that measure updates are in `measured_rate` and `kl_adaptive`.
Whoever needs to know what a rule asks of its user reads the rule's attributes and never its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo.estimators.averages import MomentAverage


@dataclass(frozen=True)
class RateSettings:
    """The settings of all rules; every rule reads those that concern it.

    Raises:
        ValueError: a value is out of range.
    """

    optimizer: Optimizer
    floor: float = 0.0
    ceiling: float = 1.0
    kl: float = 0.5
    growth: float = 3.0
    shrinkage: float = 2.0
    updates: int = 1
    rounds: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.ceiling:
            raise ValueError(f"need 0 <= floor <= ceiling, got floor {self.floor} and ceiling {self.ceiling}.")
        if not 0 < self.kl < math.inf or not self.growth > 1 or not self.shrinkage > 1:
            given = f"{self.kl}, {self.growth} and {self.shrinkage}"
            raise ValueError(f"need kl > 0, growth > 1 and shrinkage > 1, got {given}.")


class BatchFacts(NamedTuple):
    """What a rule may know of the batch whose update comes next, beside its signal and noise."""

    ess_ratio: float = 1.0
    """The effective sample size of its importance weights over its size; 1 on-policy."""
    mean_length: float | None = None
    """The mean length of its outputs in tokens, if the caller has it."""
    fresh: bool = True
    """Whether no update was made on it before."""
    headroom: float = math.inf
    """The least nats an output that could earn all that is left to earn (`headroom`)."""


class Step(NamedTuple):
    """The outcome of an update: how far it went."""

    kl: float
    """How far the update moved the policy, in nats."""
    share: float
    """How much of the update is left; 1 unless it would have moved the policy too far."""


class Rule(ABC):
    """A rule for the factor on eta_0. Subclasses define `factor`; the rest is what most of them have in common."""

    memory: ClassVar[float] = 0.9
    """Decay of the averages of signal and noise, unless the user sets one."""
    nats: ClassVar[float] = RateSettings.kl
    """How far an update may or should move the policy, unless the user says so (`RateSettings.kl`)."""
    target_kl: float = math.nan
    """The nats an output that the next update is meant to take; NaN where the rule has no such aim."""
    keeps: ClassVar[int] = 0
    """The bytes that it keeps of every trained number between steps."""
    measures_updates: ClassVar[bool] = False
    """Whether `SNRSchedule.confine` has to be called after every update."""

    def __init__(self, settings: RateSettings) -> None:
        self.settings = settings

    @abstractmethod
    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The factor on eta_0 for the next update.

        Args:
            average: signal and noise, averaged up to and with this batch.
            batch: what else is known of it.
        """

    @classmethod
    def refusal(cls, optimizer: str, learning_rate: float) -> str:
        """Why the rule cannot work with an optimizer of this name at this rate, in a sentence; empty if it can."""
        return ""

    def stepped(self, used: float | None) -> None:  # noqa: B027  (most rules need not know)
        """Take note that `optimizer.step()` was called at this rate; None: at one that the schedule did not set."""

    def confine(self, change: Callable[[], Tensor]) -> Step:
        """Measure how far the update moved the policy; see `SNRSchedule.confine`."""
        return Step(mean_kl(change()), 1.0)

    numbers: ClassVar[tuple[str, ...]] = ()
    """Attributes that a resumed run needs of the rule; plain numbers."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs of the rule, as plain numbers."""
        return {name.removeprefix("_"): getattr(self, name) for name in self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        for name in self.numbers:
            setattr(self, name, state[name.removeprefix("_")])


class Off(Rule):
    """The factor is 1: the rate is the optimizer's own."""

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The factor 1."""
        return 1.0


class EffectiveSampleSize(Rule):
    """The factor is sqrt(ESS / B) alone, the rate of VCPO (arXiv 2602.17616)."""

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The root of the effective sample size over the batch size."""
        return math.sqrt(batch.ess_ratio)


class Debiased(Rule):
    """The factor is theorem 4's S / (S + T/N) with unbiased S and T, cut at 0: it can brake down to nothing."""

    unbiased: ClassVar[bool] = True

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The signal's share of the gradient, within the bounds."""
        factor = average.signal_share(self.unbiased) * math.sqrt(batch.ess_ratio)
        return min(max(factor, self.settings.floor), self.settings.ceiling)


class PlugIn(Debiased):
    """The factor is theorem 4's with ||g||^2 for ||grad J||^2, the paper read literally.

    Its N SNR is about 1 too high, so that the factor hardly ever falls below 1/2: it cannot brake.
    """

    unbiased: ClassVar[bool] = False


def differ(rewards_PG: Tensor, valid_PG: Tensor) -> bool:
    """Whether any reward that counts differs from another by more than float32 rounds; if none does, no step is made.

    Scores have the mean 0, so that what a batch of equal rewards says is all but noise: what a baseline remembers of
    other batches times the mean score. With rewards of 0 and 1, 1 with the chance p, and a remembered b, leaving such
    batches out takes the share P(all 0) b / (1 - p) + P(all 1) (1 - b) / p off the gradient's mean. Where b is what the
    policy earns that is less than p, or 1 - p; with a baseline of the group alone it is 0.

    Args:
        rewards_PG: the rewards F.
        valid_PG: which outputs count.
    """
    rewards_N = rewards_PG[valid_PG].double()
    return bool(rewards_N.max() - rewards_N.min() > 1e-6 * rewards_N.abs().max()) if len(rewards_N) else False


def headroom(rewards_PG: Tensor, valid_PG: Tensor) -> float:
    """The least nats an output by which a policy must move to earn all that is left: (max F - mean F)^2 / (2 Var F).

    J(pi') - J(pi) = E[F (pi'/pi - 1)] is at most sd(F) sqrt(E[(pi'/pi - 1)^2]), about sd(F) sqrt(2 KL), and there is
    no more to gain than the best reward of the batch less its mean. Where one output of n fails and the others earn
    all there is, it is 1 / (2 (n - 1)); where one succeeds, (n - 1) / 2. It is infinite where all rewards are equal.

    Args:
        rewards_PG: the rewards F.
        valid_PG: which outputs count.
    """
    rewards_N = rewards_PG[valid_PG].double()
    left, variance = float(rewards_N.max() - rewards_N.mean()), float(rewards_N.var(correction=0))
    return left**2 / (2 * variance) if variance else math.inf


def mean_kl(change: Tensor) -> float:
    """KL(before || after) in nats an output: the mean over outputs of sum over tokens of exp(c) - 1 - c.

    c is the change of the log-probability of a token that was drawn before the update: (S, T), 0 where a row has no
    token, or (S,) where an output is taken as one token. As E[exp(c)] = 1, the sum is without bias (Schulman's k3) for
    outputs of the policy just before the update that the update has not seen; for others it is approximate. Those of
    the batch itself were pushed along by the update, all their tokens together: by output that counts once for every
    pair of tokens, by token once for each. Hence by token wherever it can be had. The result is infinite if any change
    is NaN or infinite.
    """
    change = change.detach().double()
    if not change.isfinite().all():
        return math.inf
    return max(0.0, float((change.expm1() - change).sum() / len(change)))


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a parameter group's rate in place; compiled and capturable optimizers hold on to the tensor."""
    if isinstance(group["lr"], Tensor):
        with torch.no_grad():
            group["lr"].copy_(rate)
    else:
        group["lr"] = rate
