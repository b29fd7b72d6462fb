"""Factors on the learning rate that follow from signal and noise: plain functions, one a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from oblrpo.estimators.averages import MomentAverage


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

    ess_ratio: float = 1.0
    """The effective sample size of its importance weights over its size; 1 on-policy."""
    mean_length: float | None = None
    """The mean length of its outputs in tokens, if the caller has it."""
    fresh: bool = True
    """Whether no update was made on it before."""
    headroom: float = math.inf
    """The least nats an output that could earn all that is left to earn (`headroom`)."""
    measured: bool = True
    """Whether its signal and noise were measured, so that the averages' last batch is this one."""


def debiased(average: MomentAverage, batch: BatchFacts, settings: RateSettings) -> float:
    """Theorem 4's S / (S + T/N) with unbiased S and T, cut at 0: it can brake down to nothing."""
    return min(max(average.signal_share() * math.sqrt(batch.ess_ratio), settings.floor), settings.ceiling)


def plugin(average: MomentAverage, batch: BatchFacts, settings: RateSettings) -> float:
    """Theorem 4's factor with ||g||^2 for ||grad J||^2, the paper read literally.

    Its N SNR is about 1 too high, so that the factor hardly ever falls below 1/2: it cannot brake.
    """
    share = average.signal_share(debiased=False)
    return min(max(share * math.sqrt(batch.ess_ratio), settings.floor), settings.ceiling)


def ess(average: MomentAverage, batch: BatchFacts, settings: RateSettings) -> float:
    """The root of the effective sample size over the batch size, the rate of VCPO (arXiv 2602.17616)."""
    return math.sqrt(batch.ess_ratio)


def off(average: MomentAverage, batch: BatchFacts, settings: RateSettings) -> float:
    """The factor 1: the rate is the optimizer's own."""
    return 1.0


FACTORS = {"debiased": debiased, "plugin": plugin, "ess": ess, "off": off}
"""The schedules whose factor depends on nothing but averages, batch and settings."""
