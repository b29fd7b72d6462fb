"""Which outputs of a batch go through the model a second time, for the gradient."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from oblrpo.estimators import advantages
from oblrpo.estimators.advantages import ROUNDING
from oblrpo.step.flow import Batch


def without_idle(batch: Batch, baseline_PG: Tensor) -> Batch:
    """The batch without outputs of advantage 0; one is kept where all are such, so that there is a gradient, of 0."""
    advantages_PG = advantages(batch.rewards_PG, baseline_PG, batch.valid_PG)
    skipped_PG = advantages_PG.abs() <= ROUNDING * batch.rewards_PG.abs().max()  # what float32 leaves of 0
    if skipped_PG.all():
        skipped_PG[tuple(batch.valid_PG.nonzero()[0])] = False
    return replace(batch, skipped_PG=skipped_PG)
