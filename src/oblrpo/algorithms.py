"""Algorithms as rows of a table: a baseline, a normalisation, a loss weighting and a schedule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from oblrpo.config import AlgorithmConfig, OptimConfig
from oblrpo.errors import InputError


@dataclass(frozen=True)
class Algorithm:
    """Names into `estimators.BASELINES`, `NORMALISATIONS`, `WEIGHTINGS`, and a mode of `SNRSchedule`."""

    baseline: str
    normalisation: str = "none"
    weighting: str = "sequence"
    schedule: str = "off"

    @property
    def smallest_group(self) -> int:
        """The fewest valid outputs that a prompt takes part with: as many as baseline and normalisation compare."""
        from oblrpo.estimators import BASELINES, SMALLEST_GROUP

        return max(BASELINES[self.baseline].smallest_group, SMALLEST_GROUP.get(self.normalisation, 1))


ALGORITHMS = {
    "oblrpo": Algorithm("oblr", schedule="debiased"),
    "oblrpo_shrunk": Algorithm("oblr_shrunk", schedule="auto"),
    "rloo": Algorithm("rloo"),
    "grpo": Algorithm("grpo", "group_std", "sequence_mean"),
    "dr_grpo": Algorithm("dr_grpo", weighting="constant"),
    "reinforce": Algorithm("none"),
    "reinforce_pp": Algorithm("reinforce_pp", "batch_std"),
    "opo": Algorithm("opo"),
    "otb": Algorithm("otb"),
    "vcpo": Algorithm("vcpo", schedule="ess"),
    "js": Algorithm("js"),
}


def resolve(algorithm: AlgorithmConfig, optim: OptimConfig) -> Algorithm:
    """The table's row with the entries that the user named replaced; a baseline brings its own normalisation.

    Raises:
        InputError: a name that is in no table.
    """
    from oblrpo.estimators import BASELINES, NORMALISATIONS, SCHEDULE_MODES, WEIGHTINGS  # torch, which reports spare

    given: dict[str, tuple[str, Collection[str]]] = {
        "baseline": (algorithm.baseline, BASELINES),
        "normalisation": (algorithm.normalisation, NORMALISATIONS),
        "weighting": (algorithm.weighting, WEIGHTINGS),
        "schedule": (optim.schedule, SCHEDULE_MODES),
    }
    for key, (name, table) in {"algorithm": (algorithm.algorithm, ALGORITHMS), **given}.items():
        if (name or key == "algorithm") and name not in table:
            raise InputError(f"unknown {key} {name!r}; choose one of: {', '.join(table)}.")
    named = {key: name for key, (name, _) in given.items() if name}
    if "baseline" in named:
        named = {"normalisation": BASELINES[named["baseline"]].normalisation} | named
    return replace(ALGORITHMS[algorithm.algorithm], **named)
