"""The learning rate of robot learning's PPO: longer steps while they move the policy too little, shorter ones after."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.measuring import MeasuringRule
from oblrpo.estimators.rules import BatchFacts, RateSettings, Step

LEAST_RATE, MOST_RATE = 1e-9, 1.0
"""Bounds on the rate, wide enough for a language model and for a toy; rsl_rl's are 1e-5 and 1e-2."""
FACTOR = 1.5
"""How many times the rate changes after a step that went too far or not far enough."""
TOLERANCE = 2.0
"""A KL between target / TOLERANCE and target * TOLERANCE leaves the rate as it is."""


class KLAdaptive(MeasuringRule):
    """The rate falls 1.5 times after a step of more than twice the target KL, and grows so after one of less than half.

    The rule of rsl_rl, rl_games and torchrl, which knows nothing of noise. The first rate is the optimizer's own. No
    step is shortened, and the rate never grows after a step that was not felt.

    Args:
        settings: the optimizer, and the target (`kl`) in nats an output.
    """

    mode: ClassVar[str] = "kl"
    nats: ClassVar[float] = 0.02
    numbers: ClassVar[tuple[str, ...]] = (*MeasuringRule.numbers, "rate", "_start")

    def __init__(self, settings: RateSettings) -> None:
        super().__init__(settings)
        self.rate = self._start = 0.0
        self.target_kl = settings.kl

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The rate of this update divided by the first."""
        if not self._start:
            self._start = self.rate = self._first_rate()
        if self.settings.rounds:
            self._hold()
        return self.rate / self._start

    @torch.no_grad()
    def confine(self, change: Callable[[], Tensor]) -> Step:
        """Measure the update, which stays as it is, and choose the rate of the next one."""
        kl, target = self._kl(change, self._used), self.settings.kl
        self._used, self._before = None, []
        if kl > TOLERANCE * target:
            self.rate = max(self.rate / FACTOR, LEAST_RATE)
        elif 0 < kl < target / TOLERANCE:
            self.rate = min(self.rate * FACTOR, MOST_RATE)
        return Step(kl, 1.0)
