"""The adapter's own settings, `+oblrpo.KEY=VALUE` on verl's command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from oblrpo.errors import InputError
from oblrpo.settings.annotations import Range, check_ranges
from oblrpo.settings.typed import of_mapping

ESTIMATORS = {"oblr_po": "oblr", "oblr_po_shrunk": "oblr_shrunk"}
"""The names of the advantage estimators in verl, each with its baseline in `estimators.BASELINES`."""


@dataclass(frozen=True)
class Settings:
    """How scores are taken and the rate is set."""

    schedule: Literal["auto", "debiased", "plugin", "off"] = "auto"
    """Factor on actor.optim.lr: auto (measured from the updates themselves; actor.optim.lr is only where it begins),
    debiased or plugin (N SNR / (1 + N SNR)), or off."""
    kl: float = 1.0
    """Nats a completion that a step of the measured rate is meant to move the policy by at most."""
    score_norms: Literal["exact", "calibrated"] = "calibrated"
    """Weights of rewards in the baseline: calibrated, a proxy from the forward alone that learns from exact norms of
    some prompts every calibration_steps steps; or exact squared score norms in every step."""
    calibration_steps: Annotated[int, Range(1)] = 10
    """With calibrated norms, steps between two with exact norms; signal and noise are measured in those alone."""
    calibration_share: float = 0.25
    """With calibrated norms, the share of a batch's prompts that exact norms are taken of, in those steps."""
    inner_products: Literal["exact", "sketched"] = "exact"
    """How the inner products of one prompt's scores are taken, for the SNR: exact (a prompt's outputs go through
    the model together) or sketched (unbiased estimates; micro-batches are verl's own, and a prompt may be spread over
    ranks)."""
    prompts_per_micro_batch: Annotated[int, Range(1)] = 1
    """How many prompts go through the model at a time in the pass that takes exact inner products."""
    sketch_dimensions: Annotated[int, Range(1)] = 4096
    """How many numbers a sketch keeps of a sequence."""
    sketch_directions: Annotated[int, Range(1)] = 16
    """How many random combinations of each matrix's rows a sketch starts from."""
    ledger_steps: Annotated[int, Range(0)] = 0
    """Every so many steps the variance ledger is taken; 0: never."""

    @property
    def needs_moments(self) -> bool:
        """Whether the gradient's signal and noise are measured."""
        return self.schedule != "off"

    @property
    def calibrated(self) -> bool:
        """Whether weights come from a forward alone, and most steps measure neither norms nor signal and noise."""
        return self.score_norms == "calibrated"

    @property
    def exact_pairs(self) -> bool:
        """Whether all outputs of a prompt must go through the model together, on one rank."""
        return self.needs_moments and self.inner_products == "exact"


def read_settings(given: Mapping[str, Any] | None) -> Settings:
    """Return the settings in `config.oblrpo`."""
    settings = of_mapping(Settings, given or {}, "oblrpo")
    check_ranges(settings)
    if not 0 < settings.kl < math.inf:
        raise InputError(f"oblrpo.kl must be a number of nats above 0, got {settings.kl}.")
    if not 0 < settings.calibration_share <= 1:
        raise InputError(f"oblrpo.calibration_share must lie in (0, 1], got {settings.calibration_share}.")
    return settings
