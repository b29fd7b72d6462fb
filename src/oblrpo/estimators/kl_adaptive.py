"""The learning rate of robot learning's PPO: longer steps while they move the policy too little, shorter ones after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.measuring import GaugeState, Step, UpdateGauge
from oblrpo.estimators.rate_factors import BatchFacts, RateSettings

LEAST_RATE, MOST_RATE = 1e-9, 1.0
"""Bounds on the rate, wide enough for a language model and for a toy; rsl_rl's are 1e-5 and 1e-2."""
FACTOR = 1.5
"""How many times the rate changes after a step that went too far or not far enough."""
TOLERANCE = 2.0
"""A KL between target / TOLERANCE and target * TOLERANCE leaves the rate as it is."""


class KLAdaptive:
    """The rate falls 1.5 times after a step of more than twice the target KL, and grows so after one of less than half.

    The rule of rsl_rl, rl_games and torchrl, which knows nothing of noise. The first rate is the optimizer's own. No
    step is shortened, and the rate never grows after a step that was not felt.

    Args:
        gauge: measures the updates.
        settings: the target (`kl`) in nats an output.
    """

    def __init__(self, gauge: UpdateGauge, settings: RateSettings) -> None:
        self.gauge, self.target_kl = gauge, settings.kl
        self.rate = self.start = 0.0

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        """The rate of this update divided by the first."""
        if not self.start:
            self.start = self.rate = self.gauge.first_rate("kl")
        if self.gauge.low_precision:
            self.gauge.hold()
        return self.rate / self.start

    @torch.no_grad()
    def confine(self, change: Callable[[], Tensor], used: float | None) -> Step:
        """Measure the update, which stays as it is, and choose the rate of the next one."""
        kl = self.gauge.kl(change, used)
        self.gauge.copies = []
        if kl > TOLERANCE * self.target_kl:
            self.rate = max(self.rate / FACTOR, LEAST_RATE)
        elif 0 < kl < self.target_kl / TOLERANCE:
            self.rate = min(self.rate * FACTOR, MOST_RATE)
        return Step(kl, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain numbers."""
        return {"rate": self.rate, "start": self.start, "gauge": asdict(self.gauge.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.rate, self.start, self.gauge.state = state["rate"], state["start"], GaugeState(**state["gauge"])
