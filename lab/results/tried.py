"""The measured rate without what it consists of, and the rule before it: controls, for runs of the laboratory alone."""

from __future__ import annotations

import math
from dataclasses import replace

from oblrpo.estimators.measured_rate import MeasuredRate, RateSettings, Slope
from oblrpo.estimators.measuring import UpdateGauge
from oblrpo.estimators.schedule import MEASURED_RATES


class _Blind(Slope):
    def observe(self, slope: float, length: float, P: float) -> None:
        """Nothing is seen, and the length stays what it is while nothing is known."""


class Unguided(MeasuredRate):
    """The control of the slope: the same KL a token in every step, whatever the next gradient says."""

    def __init__(self, gauge: UpdateGauge, settings: RateSettings) -> None:
        super().__init__(gauge, settings, _Blind())


class _ByAge(Slope):
    """sqrt(1 / (sqrt(T) (t + 4))) root-nats a token in step t."""

    steps = 0
    tokens = 1.0

    @property
    def length(self) -> float:
        return (math.sqrt(self.tokens) * (self.steps + 4)) ** -0.5


class InSteps(MeasuredRate):
    """The rule before: KL_t = sqrt(T) / (t + 4), by the number of updates, whatever nats are allowed."""

    def __init__(self, gauge: UpdateGauge, settings: RateSettings) -> None:
        self.slope: _ByAge
        super().__init__(gauge, replace(settings, kl=1e9), _ByAge())

    def factor(self, average, batch):  # type: ignore[no-untyped-def]
        """The next rate divided by the first."""
        self.slope.steps += 1
        self.slope.tokens = batch.mean_length or 1.0
        return super().factor(average, batch)


class AnyMomentum(MeasuredRate):
    """The rule with optimizers that it refuses."""

    def __init__(self, gauge: UpdateGauge, settings: RateSettings) -> None:
        super().__init__(gauge, settings, most_momentum=1.0)


TRIED: dict[str, type[MeasuredRate]] = {"unguided": Unguided, "in-steps": InSteps, "any-momentum": AnyMomentum}


def adopt(rule: str) -> None:
    """Let the schedule `auto` be one of these rules, in this process."""
    MEASURED_RATES["auto"] = TRIED[rule]
