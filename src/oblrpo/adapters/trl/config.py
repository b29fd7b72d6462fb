"""The settings of `OBLRPOTrainer`: those of TRL's `GRPOConfig`, some with other defaults, and ours."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import trl
from trl import GRPOConfig

from oblrpo.adapters.shared.conditions import check_version
from oblrpo.adapters.trl.checks import check_config
from oblrpo.tables.baselines import UNBIASED
from oblrpo.tables.schedules import SCHEDULES

check_version("trl", trl.__version__, (1, 16), (1, 17))  # `OBLRPOTrainer` overrides what is inside it

LOGGER = logging.getLogger(__name__)


@dataclass
class OBLRPOConfig(GRPOConfig):  # type: ignore[misc]
    r"""Configuration of [`OBLRPOTrainer`]; every parameter of [`~trl.GRPOConfig`], and those below.

    Seven of its own defaults (below, first) differ, so that a configuration in which nothing else is set is valid.
    """

    loss_type: str = field(
        default="luspo",
        metadata={"help": "The sum over tokens of each sequence, the mean over sequences; no other is the gradient."},
    )
    importance_sampling_level: str = field(
        default="sequence", metadata={"help": "No effect, because updates are on-policy. TRL requires it with luspo."}
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Rewards are not scaled: their standard deviation would depend on the completion itself."},
    )
    gradient_accumulation_steps: int = field(
        default=8,
        metadata={"help": "Micro-batches per update. An update needs at least two prompts, to measure their noise."},
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "TRL's scheduler, which multiplies the rate of `schedule`."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Truncated ratios in the loss would make every baseline biased."}
    )
    router_aux_loss_coef: float | None = field(
        default=0.0, metadata={"help": "The router's loss would add a gradient that is not measured."}
    )

    baseline: str = field(
        default="oblr_shrunk",
        metadata={
            "help": f"What is subtracted from each reward: {', '.join(f'`{name}`' for name in UNBIASED)}. Baselines "
            "that look at the completion's own reward are refused, because they are biased."
        },
    )
    score_norms: str = field(
        default="exact",
        metadata={
            "help": "Weights of rewards in the oblr baselines: `exact` squared score norms in every step, or "
            "`calibrated`, a proxy from the forward alone that learns from exact norms every `calibration_steps` "
            "steps. The gradient is unbiased with either."
        },
    )
    calibration_steps: int = field(
        default=10, metadata={"help": "With `score_norms='calibrated'`, steps between two with exact norms."}
    )
    score_method: str = field(
        default="auto",
        metadata={
            "help": "How norms and gradient are taken: `gram` or `instantiate` in one backward, which differ in "
            "memory; `two_pass` in a pass for norms (or calibrated weights) and one for the gradient, in the least; "
            "`auto` is one backward, and `two_pass` where a micro-batch is smaller than a group. All are exact."
        },
    )
    schedule: str = field(
        default="auto",
        metadata={
            "help": "Factor on the learning rate: "
            + "; ".join(f"`{name}`, {row.meaning}" for name, row in SCHEDULES.items())
        },
    )
    schedule_kl: float | None = field(
        default=None,
        metadata={
            "help": f"Most nats per completion that a step of `auto` may take (None: {SCHEDULES['auto'].nats}); the "
            f"target of `kl` ({SCHEDULES['kl'].nats})."
        },
    )

    def __post_init__(self) -> Any:
        super().__post_init__()
        if self.use_liger_kernel:  # type: ignore[has-type]
            LOGGER.warning("use_liger_kernel is ignored: its layers compute the same, but hide it from score norms.")
            self.use_liger_kernel = False
        check_config(self)
