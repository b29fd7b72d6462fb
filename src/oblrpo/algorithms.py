"""Algorithms as rows of a table: a baseline, a normalisation, a loss weighting, a schedule and a ratio."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oblrpo.errors import InputError
from oblrpo.settings import AlgorithmConfig, OptimConfig

if TYPE_CHECKING:
    from oblrpo.estimators import Ratio


@dataclass(frozen=True)
class Algorithm:
    """Names into `estimators.BASELINES`, `NORMALISATIONS`, `WEIGHTINGS`, `RATIOS`, and a mode of `SNRSchedule`."""

    baseline: str
    normalisation: str = "none"
    weighting: str = "sequence"
    schedule: str = "off"
    ratio: str = "sequence"

    @property
    def smallest_group(self) -> int:
        """The fewest valid outputs that a prompt takes part with: as many as baseline and normalisation compare."""
        from oblrpo.estimators import BASELINES, SMALLEST_GROUP

        return max(BASELINES[self.baseline].smallest_group, SMALLEST_GROUP.get(self.normalisation, 1))


LOOKS_ACROSS = frozenset({"none", "reinforce_pp", "js", "oblr_shrunk"})
"""The baselines under which a prompt whose completions all earn the same still has advantages other than 0."""

ALGORITHMS = {
    "oblrpo": Algorithm("oblr", schedule="debiased"),
    "oblrpo_shrunk": Algorithm("oblr_shrunk", schedule="auto", ratio="ppo"),
    "rloo": Algorithm("rloo"),
    "grpo": Algorithm("grpo", "group_std", "sequence_mean", ratio="ppo"),
    "dr_grpo": Algorithm("dr_grpo", weighting="constant", ratio="ppo"),
    "reinforce": Algorithm("none"),
    "reinforce_pp": Algorithm("reinforce_pp", "batch_std", ratio="ppo"),
    "opo": Algorithm("opo"),
    "vcpo": Algorithm("vcpo", schedule="ess"),
    "js": Algorithm("js"),
}


def resolve(algorithm: AlgorithmConfig, optim: OptimConfig) -> Algorithm:
    """The table's row with the entries that the user named replaced; a baseline brings its own normalisation."""
    # Imported here because they load torch, and `oblrpo report`, which reads the table above, needs none.
    from oblrpo.estimators import BASELINES, NORMALISATIONS, RATIOS, SCHEDULE_MODES, WEIGHTINGS

    trainable = [name for name, entry in BASELINES.items() if entry.trainable]
    if algorithm.baseline in BASELINES and algorithm.baseline not in trainable:
        raise InputError(
            f"the baseline {algorithm.baseline!r} is measured in the variance ledger only; train with one of: "
            f"{', '.join(trainable)}."
        )
    given: dict[str, tuple[str, Collection[str]]] = {
        "baseline": (algorithm.baseline, trainable),
        "normalisation": (algorithm.normalisation, NORMALISATIONS),
        "weighting": (algorithm.weighting, WEIGHTINGS),
        "schedule": (optim.schedule, SCHEDULE_MODES),
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
    from oblrpo.estimators import RATIOS, Bounds

    ratio, low, high = RATIOS[algorithm.ratio], config.epsilon, config.epsilon_high
    for name, value, own in (("epsilon", low, ratio.bounds.low), ("epsilon_high", high, ratio.bounds.high)):
        if value is not None and math.isinf(own):
            raise InputError(f"{name} would change nothing, for the ratio {algorithm.ratio!r} has no such bound.")
    if algorithm.ratio == "cispo" and high is not None and high < 1:
        raise InputError(f"epsilon_high is {high}; the ratio 'cispo' is truncated at it, so it must be at least 1.")
    own_high = ratio.bounds.high if low is None else low
    return replace(ratio, bounds=Bounds(ratio.bounds.low if low is None else low, own_high if high is None else high))
