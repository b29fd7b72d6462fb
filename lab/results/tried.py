"""The measured rate without what it consists of, and the rule before it: controls, for runs of the laboratory alone."""

from __future__ import annotations

from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.brake import Brake
from oblrpo.estimators.measured_rate import MeasuredRate
from oblrpo.estimators.rules import RateSettings
from oblrpo.estimators.schedule import RULES


class _Off(Brake):
    def observe(self, gain: float, P: float) -> None:
        """Nothing is seen, and the share stays 1."""


class Unbraked(MeasuredRate):
    """The control of the brake: steps are as long as the run's age allows, whether they turn back or not."""

    def __init__(self, settings: RateSettings) -> None:
        super().__init__(settings)
        self.brake = _Off()


class InSteps(Unbraked):
    """The rule before: age in updates and no brake, KL_t = delta sqrt(T) / (t + 4)."""

    def factor(
        self, average: MomentAverage, ess_ratio: float, mean_length: float | None = None, fresh: bool = True
    ) -> float:
        """The next rate divided by the first."""
        self.delay = 4 * average.moments.n
        return super().factor(average, ess_ratio, mean_length, fresh)


TRIED: dict[str, type[MeasuredRate]] = {"unbraked": Unbraked, "in-steps": InSteps}


def adopt(rule: str) -> None:
    """Let the schedule `auto` be one of these rules, in this process."""
    RULES["auto"] = TRIED[rule]
