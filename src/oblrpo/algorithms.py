"""The algorithm that settings ask for: a row of `ALGORITHMS` with the entries that they name replaced."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from oblrpo.errors import InputError
from oblrpo.settings import AlgorithmConfig, OptimConfig
from oblrpo.tables.algorithms import ALGORITHMS, NORMALISATIONS, WEIGHTINGS, Algorithm
from oblrpo.tables.baselines import BASELINES, TRAINABLE
from oblrpo.tables.ratios import RATIOS, Bounds, Ratio
from oblrpo.tables.schedules import SCHEDULES


def resolve(algorithm: AlgorithmConfig, optim: OptimConfig) -> Algorithm:
    """The table's row with the entries that the user named replaced; a baseline brings its own normalisation."""
    if algorithm.baseline in BASELINES and algorithm.baseline not in TRAINABLE:
        raise InputError(
            f"the baseline {algorithm.baseline!r} is measured in the variance ledger only; train with one of: "
            f"{', '.join(TRAINABLE)}."
        )
    given: dict[str, tuple[str, Collection[str]]] = {
        "baseline": (algorithm.baseline, TRAINABLE),
        "normalisation": (algorithm.normalisation, NORMALISATIONS),
        "weighting": (algorithm.weighting, WEIGHTINGS),
        "schedule": (optim.schedule, SCHEDULES),
        "ratio": (algorithm.ratio, RATIOS),
    }
    for key, (name, table) in {"algorithm": (algorithm.algorithm, ALGORITHMS), **given}.items():
        if (name or key == "algorithm") and name not in table:
            raise InputError(f"unknown {key} {name!r}; choose one of: {', '.join(table)}.")
    named = {key: name for key, (name, _) in given.items() if name}
    if "baseline" in named:
        named = {"normalisation": BASELINES[named["baseline"]].normalisation} | named
    return replace(ALGORITHMS[algorithm.algorithm], **named)


def ratio_of(config: AlgorithmConfig, algorithm: Algorithm) -> Ratio:
    """The algorithm's ratio with the bounds of the config, or else with those of its source."""
    ratio, low, high = RATIOS[algorithm.ratio], config.epsilon, config.epsilon_high
    for name, value, own in (("epsilon", low, ratio.bounds.low), ("epsilon_high", high, ratio.bounds.high)):
        if value is not None and math.isinf(own):
            raise InputError(f"{name} would change nothing, for the ratio {algorithm.ratio!r} has no such bound.")
    if algorithm.ratio == "cispo" and high is not None and high < 1:
        raise InputError(f"epsilon_high is {high}; the ratio 'cispo' is truncated at it, so it must be at least 1.")
    own_high = ratio.bounds.high if low is None else low
    return replace(ratio, bounds=Bounds(ratio.bounds.low if low is None else low, own_high if high is None else high))
