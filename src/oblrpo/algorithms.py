"""The algorithm that settings ask for: a row of `ALGORITHMS` with the entries that they name replaced."""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from oblrpo.checksums import sum_of
from oblrpo.errors import InputError
from oblrpo.settings import AlgorithmConfig, OptimConfig
from oblrpo.tables.algorithms import (
    ALGORITHMS,
    RATIOS,
    SCHEDULES,
    SMALLEST_GROUPS,
    WEIGHTING_NAMES,
    Algorithm,
    Bounds,
    Ratio,
)
from oblrpo.tables.baselines import BASELINES
from oblrpo.user_code import load_named

_registered: dict[str, str] = {}
"""Baselines by `file.py:function` -> the digest of the file that they were loaded from."""


def resolve(algorithm: AlgorithmConfig, optim: OptimConfig) -> Algorithm:
    """The table's row with the entries that the user named replaced; a baseline brings its own normalisation.

    A baseline that is named by `file.py:function` is loaded, into this process, and added to `BASELINES`.

    Raises:
        InputError: a name is unknown, or the baseline cannot be loaded.
    """
    if ":" in algorithm.baseline:
        _register(algorithm.baseline)
    trainable = [name for name, row in BASELINES.items() if row.trainable]
    if algorithm.baseline in BASELINES and algorithm.baseline not in trainable:
        raise InputError(
            f"the baseline {algorithm.baseline!r} is measured in the variance ledger only; train with one of: "
            f"{', '.join(trainable)}."
        )
    given: dict[str, tuple[str, Collection[str]]] = {
        "baseline": (algorithm.baseline, trainable),
        "normalisation": (algorithm.normalisation, SMALLEST_GROUPS),
        "weighting": (algorithm.weighting, WEIGHTING_NAMES),
        "schedule": (optim.schedule, SCHEDULES),
        "ratio": (algorithm.ratio, RATIOS),
    }
    for key, (name, table) in {"algorithm": (algorithm.algorithm, ALGORITHMS), **given}.items():
        if (name or key == "algorithm") and name not in table:
            own = ", or write file.py:function" if key == "baseline" else ""
            raise InputError(f"unknown {key} {name!r}; choose one of: {', '.join(table)}{own}.")
    named = {key: name for key, (name, _) in given.items() if name}
    if "baseline" in named:
        named = {"normalisation": BASELINES[named["baseline"]].normalisation} | named
    return replace(ALGORITHMS[algorithm.algorithm], **named)


def ratio_of(config: AlgorithmConfig, algorithm: Algorithm) -> Ratio:
    """The algorithm's ratio with the bounds of the config, or else with those of its source."""
    ratio, low, high = RATIOS[algorithm.ratio], config.epsilon, config.epsilon_high
    for name, value, own in (("epsilon", low, ratio.bounds.low), ("epsilon_high", high, ratio.bounds.high)):
        if value is not None and math.isinf(own):
            raise InputError(f"{name} has no effect because the ratio {algorithm.ratio!r} has no such bound.")
    if algorithm.ratio == "cispo" and high is not None and high < 1:
        raise InputError(f"epsilon_high is {high}; the ratio 'cispo' is truncated at it, so it must be at least 1.")
    own_high = ratio.bounds.high if low is None else low
    return replace(ratio, bounds=Bounds(ratio.bounds.low if low is None else low, own_high if high is None else high))


def _register(path: str) -> None:
    """Load the baseline at `file.py:function`, unless this file was loaded before and has not changed since."""
    file = Path(path.rpartition(":")[0])
    if file.is_file() and sum_of(file) == _registered.get(path):
        return
    function: Any = load_named(path, "baseline")
    from oblrpo.estimators import register_baseline  # here, because it loads torch

    try:
        register_baseline(path, function)
    except ValueError as error:
        raise InputError(str(error)) from error
    _registered[path] = sum_of(file)
