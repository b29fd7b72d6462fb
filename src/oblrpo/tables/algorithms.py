"""The algorithms, a row each: a baseline, a normalisation, a loss weighting, a schedule and a ratio."""

import math
from dataclasses import dataclass

from oblrpo.tables.baselines import BASELINES


@dataclass(frozen=True)
class Bounds:
    """How far a ratio may go before it is clipped; what the two numbers bound depends on the ratio."""

    low: float = math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Ratio:
    """What is known of a way to weigh the gradient of log pi on completions of an earlier policy."""

    function: str  # its function in `estimators.ratios`
    meaning: str
    source: str = ""
    by_token: bool = False  # whether tokens of one completion have weights of their own
    is_importance_weight: bool = False
    """Whether it is that itself, which a sampler's correction takes against the sampler instead."""
    bounds: Bounds = Bounds()  # how far it may go; in `RATIOS` as its source has it


RATIOS: dict[str, Ratio] = {
    "sequence": Ratio("sequence", "importance weight of the completion", is_importance_weight=True),
    "none": Ratio("none", "the weight 1"),
    "ppo": Ratio("ppo", "by token, clipped", "Schulman et al. 2017 (PPO), arXiv 1707.06347", by_token=True,
                 bounds=Bounds(0.2, 0.2)),
    "gspo": Ratio("gspo", "by completion, clipped", "Zheng et al. 2025 (GSPO), arXiv 2507.18071",
                  bounds=Bounds(3e-4, 4e-4)),
    "cispo": Ratio("cispo", "by token, truncated", "MiniMax 2025 (CISPO), arXiv 2506.13585; the bound of Khatri et "
                   "al. 2025 (ScaleRL), arXiv 2510.13786", by_token=True, bounds=Bounds(high=5.0)),
    "dppo": Ratio("dppo", "by token, masked", "Qi et al. 2026 (DPPO), arXiv 2602.04879", by_token=True,
                  bounds=Bounds(0.15, 0.15)),
}  # fmt: skip
"""The ratios by name, with the bounds of their sources."""


RATES_OF_THEIR_OWN = ("Rprop", "Adafactor", "Prodigy")
"""Optimizers whose step is not a direction times the rate that they are given."""


@dataclass(frozen=True)
class Schedule:
    """What is known of a schedule, which multiplies the optimizer's own rate eta_0 by a factor."""

    meaning: str
    memory: float = 0.9  # decay of the averages of signal and noise, unless the user sets one
    nats: float = 0.5
    """How far an update may or should move the policy, in nats an output, unless the user sets it."""
    state_bytes_per_parameter: int = 0  # the bytes that it keeps of every trained number between steps
    measures_updates: bool = False
    """Whether it sets the rate itself, from how far each update has moved the policy: `SNRSchedule.limit_step` has to
    be called after every one."""
    needs_signal: bool = True  # whether it sets no rate before signal and noise were measured
    needs_moments: bool = False
    """Whether its factor is made of signal and noise of every step, so that every step is looked at if not set."""


SCHEDULES: dict[str, Schedule] = {
    "debiased": Schedule("signal-to-noise ratio, theorem 4 with unbiased estimates", needs_moments=True),
    "plugin": Schedule("the same, biased: the paper read literally", needs_moments=True),
    "auto": Schedule("measured from `learning_rate` on: steps as long as the next gradients show that they should be",
                     memory=0.97, state_bytes_per_parameter=2, measures_updates=True),
    "kl": Schedule("measured, starting from `learning_rate`, towards a KL per update", nats=0.02, measures_updates=True,
                   needs_signal=False),
    "ess": Schedule("effective sample size, the rate of VCPO (arXiv 2602.17616)", needs_signal=False),
    "off": Schedule("the factor 1", needs_signal=False),
}  # fmt: skip
"""Every schedule by name; the command line, the adapters and the diagnosis read this table."""

MEASURED = tuple(name for name, row in SCHEDULES.items() if row.measures_updates)
"""Those whose rate follows how far updates move the policy."""


def refusal(schedule: str, optimizer: str, learning_rate: float) -> str:
    """Why a schedule cannot work with an optimizer of this name at this rate, in a sentence; empty if it can."""
    if not SCHEDULES[schedule].measures_updates:
        return ""
    if optimizer in RATES_OF_THEIR_OWN:
        return (
            f"schedule {schedule!r} sets the rate, but {optimizer} chooses its own; set schedule to off, or try AdamW."
        )
    return "" if learning_rate else f"schedule {schedule!r} needs a learning_rate above 0 to start from."


SMALLEST_GROUPS = {"none": 1, "group_std": 2, "batch_std": 1}
"""What advantages may be divided by -> the fewest valid outputs of a prompt that it compares."""

WEIGHTING_NAMES = ("sequence", "sequence_mean", "token_mean", "constant")  # how the loss may weigh tokens


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
    "oblrpo_lazy": Algorithm("oblr_lazy", schedule="auto", ratio="ppo"),
    "oblrpo_thrifty": Algorithm("oblr_thrifty", schedule="auto", ratio="ppo"),
    "rloo": Algorithm("rloo"),
    "grpo": Algorithm("grpo", "group_std", "sequence_mean", ratio="ppo"),
    "dr_grpo": Algorithm("dr_grpo", weighting="constant", ratio="ppo"),
    "reinforce": Algorithm("none"),
    "reinforce_pp": Algorithm("reinforce_pp", "batch_std", ratio="ppo"),
    "opo": Algorithm("opo"),
    "vcpo": Algorithm("vcpo", schedule="ess"),
    "js": Algorithm("js"),
}
