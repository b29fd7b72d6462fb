"""The adapter's own settings, `+oblrpo.KEY=VALUE` on verl's command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from oblrpo.errors import InputError
from oblrpo.estimators import RULES

ESTIMATORS = {"oblr_po": "oblr", "oblr_po_shrunk": "oblr_shrunk"}
"""The names of the advantage estimators in verl, each with its baseline in `estimators.BASELINES`."""

SCHEDULES = ("debiased", "plugin", "off")
"""The modes of `estimators.SNRSchedule` that a step of verl can follow."""

INNER_PRODUCTS = ("exact", "sketched")


@dataclass(frozen=True)
class Settings:
    """How scores are taken and the rate is set."""

    schedule: str = "debiased"
    """Factor on actor.optim.lr: debiased or plugin (N SNR / (1 + N SNR)), or off."""
    ema: float = 0.9
    """Decay of the averages of signal and noise."""
    floor: float = 0.0
    """Least factor on the rate."""
    ceiling: float = 1.0
    """Greatest factor on the rate."""
    inner_products: str = "exact"
    """How the inner products of one prompt's scores are taken, for the SNR: exact (a prompt's outputs go through
    the model together) or sketched (unbiased estimates; micro-batches are verl's own, and a prompt may be spread over
    ranks)."""
    prompts_per_micro_batch: int = 1
    """How many prompts go through the model at a time in the pass that takes exact inner products."""
    sketch_dimensions: int = 4096
    """How many numbers a sketch keeps of a sequence."""
    sketch_directions: int = 16
    """How many random combinations of each matrix's rows a sketch starts from."""
    ledger_steps: int = 0
    """Every so many steps the variance ledger is taken; 0: never."""
    prior_strength: float = -1.0
    """How many outputs of average weight the prior of oblr_po_shrunk counts for; -1: chosen from earlier steps."""
    prior_memory: float = 0.8
    """What an earlier step counts for one step later in the prior of oblr_po_shrunk."""

    @property
    def needs_moments(self) -> bool:
        """Whether the gradient's signal and noise are measured."""
        return self.schedule != "off"

    @property
    def exact_pairs(self) -> bool:
        """Whether all outputs of a prompt must go through the model together, on one rank."""
        return self.needs_moments and self.inner_products == "exact"


def read_settings(given: Mapping[str, Any] | None) -> Settings:
    """Return the settings in `config.oblrpo`.

    Raises:
        InputError: there is an unknown key, or a value of the wrong type or out of range.
    """
    known: dict[str, type] = {each.name: type(each.default) for each in fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key not in known:
            raise InputError(f"unknown setting oblrpo.{key}; there are: {', '.join(known)}.")
        kind = known[key]
        if isinstance(value, bool) or not isinstance(value, (kind, int) if kind is float else kind):
            raise InputError(f"oblrpo.{key} must be a {kind.__name__}, got {value!r}.")
        values[key] = kind(value)
    settings = Settings(**values)
    rule = RULES.get(settings.schedule)
    if rule is not None and rule.measures_updates:
        raise InputError(
            f"oblrpo.schedule={settings.schedule} is not there on verl: it measures every update by one more forward; "
            f"choose one of: {', '.join(SCHEDULES)}."
        )
    _check_ranges(settings)
    return settings


def _check_ranges(settings: Settings) -> None:
    for key, table in (("schedule", SCHEDULES), ("inner_products", INNER_PRODUCTS)):
        if getattr(settings, key) not in table:
            raise InputError(f"unknown oblrpo.{key} {getattr(settings, key)!r}; choose one of: {', '.join(table)}.")
    if not 0 <= settings.ema < 1:
        raise InputError(f"oblrpo.ema must lie in [0, 1), got {settings.ema}.")
    if not 0 <= settings.floor <= settings.ceiling:
        raise InputError("oblrpo.floor and oblrpo.ceiling need 0 <= floor <= ceiling.")
    if not 0 <= settings.prior_memory < 1:
        raise InputError(f"oblrpo.prior_memory must lie in [0, 1), got {settings.prior_memory}.")
    if settings.prior_strength < 0 and settings.prior_strength != -1:
        raise InputError("oblrpo.prior_strength is a number of outputs, or -1 to choose it.")
    for key in ("prompts_per_micro_batch", "sketch_dimensions", "sketch_directions"):
        if getattr(settings, key) < 1:
            raise InputError(f"oblrpo.{key} must be at least 1.")
    if settings.ledger_steps < 0:
        raise InputError("oblrpo.ledger_steps is a number of steps, or 0 for never.")
