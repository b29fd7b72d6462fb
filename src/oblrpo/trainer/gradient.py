"""What a step's gradient and update leave behind for whoever reports them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oblrpo import estimators
from oblrpo.policy import Logps
from oblrpo.trainer.sampler_mismatch import SamplerMismatch


@dataclass(frozen=True)
class GradientEstimate:
    """The gradient of one batch (left in `.grad`, as that of the loss -J) and all that was learned on the way."""

    norm2_PG: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    """Of a baseline by token: the mean over the output's tokens."""
    advantages_PG: Tensor
    """(F - b) over the normalisation's divisor; 0 where an output does not count."""
    logps_PG: Tensor
    rho_PG: Tensor
    counted_PG: Tensor
    """Which outputs the gradient is of."""
    moments: estimators.Moments
    grad_norm2: float
    entropy: float
    further: dict[str, float]
    """Metrics of some steps: how well proxies agree with exact norms, the variance ledger, the sampler's mismatch."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    estimate: GradientEstimate
    factor: float
    learning_rate: float
    smoothed: estimators.Moments
    snr_interval: tuple[float, float]
    kl: float | None
    """By how much the update moved the policy, nats, where it was measured."""


@dataclass(frozen=True)
class Block:
    """One micro-batch of whole groups."""

    norm2_S: Tensor | None
    baseline_PG: Tensor
    advantages_PG: Tensor
    rho_PG: Tensor
    group_norm2_P: Tensor
    output: Logps
    entropy: float
    mismatch: SamplerMismatch | None
