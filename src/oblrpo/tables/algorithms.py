"""The algorithms, a row each: a baseline, a normalisation, a loss weighting, a schedule and a ratio."""

from __future__ import annotations

from dataclasses import dataclass

from oblrpo.tables.baselines import BASELINES

SMALLEST_GROUPS = {"none": 1, "group_std": 2, "batch_std": 1}
"""What advantages may be divided by -> the fewest valid outputs of a prompt that it compares."""

WEIGHTING_NAMES = ("sequence", "sequence_mean", "token_mean", "constant")
"""How the loss may weigh tokens."""


@dataclass(frozen=True)
class Algorithm:
    """Names of rows of `BASELINES`, `SCHEDULES` and `RATIOS`, of a normalisation and of a loss weighting."""

    baseline: str
    normalisation: str = "none"
    weighting: str = "sequence"
    schedule: str = "off"
    ratio: str = "sequence"

    @property
    def smallest_group(self) -> int:
        """The fewest valid outputs that a prompt takes part with: as many as baseline and normalisation compare."""
        return max(BASELINES[self.baseline].smallest_group, SMALLEST_GROUPS[self.normalisation])

    @property
    def unbiased(self) -> bool:
        """Whether the mean gradient given a prompt is E[F s | q], that of the policy itself."""
        return BASELINES[self.baseline].unbiased and (self.normalisation, self.weighting) == ("none", "sequence")


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
