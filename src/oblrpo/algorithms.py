"""Algorithms as rows of a table: a baseline, a normalisation, a loss weighting and a schedule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from oblrpo.config import AlgorithmConfig, OptimConfig
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, NORMALISATIONS, SCHEDULE_MODES, WEIGHTINGS


@dataclass(frozen=True)
class Algorithm:
    """Names into `estimators.BASELINES`, `NORMALISATIONS`, `WEIGHTINGS`, and a mode of `SNRSchedule`."""

    baseline: str
    normalisation: str = "none"
    weighting: str = "sequence"
    schedule: str = "off"


ALGORITHMS = {
    "oblrpo": Algorithm("oblr", schedule="debiased"),
    "rloo": Algorithm("rloo"),
    "grpo": Algorithm("mean", "group_std", "sequence_mean"),
    "dr_grpo": Algorithm("mean", weighting="constant"),
    "reinforce": Algorithm("none"),
}


def resolve(algorithm: AlgorithmConfig, optim: OptimConfig) -> Algorithm:
    """The table's row with the entries that the user named replaced.

    Raises:
        InputError: a name that is in no table.
    """
    given: dict[str, tuple[str, Collection[str]]] = {
        "baseline": (algorithm.baseline, BASELINES),
        "normalisation": (algorithm.normalisation, NORMALISATIONS),
        "weighting": (algorithm.weighting, WEIGHTINGS),
        "schedule": (optim.schedule, SCHEDULE_MODES),
    }
    for key, (name, table) in {"algorithm": (algorithm.algorithm, ALGORITHMS), **given}.items():
        if (name or key == "algorithm") and name not in table:
            raise InputError(f"unknown {key} {name!r}; choose one of: {', '.join(table)}.")
    return replace(ALGORITHMS[algorithm.algorithm], **{key: name for key, (name, _) in given.items() if name})
