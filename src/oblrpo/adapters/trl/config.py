"""The settings of `OBLRPOTrainer`: those of TRL's `GRPOConfig`, some with other defaults, and ours."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import trl
from trl import GRPOConfig

from oblrpo.adapters.trl.checks import check_config

if trl.__version__.split(".")[:2] != ["1", "16"]:
    raise ImportError(
        f"OBLRPOTrainer overrides what is inside TRL 1.16, and this is TRL {trl.__version__}; install "
        "'trl>=1.16,<1.17', or a version of oblrpo that supports this one."
    )

LOGGER = logging.getLogger(__name__)


@dataclass
class OBLRPOConfig(GRPOConfig):  # type: ignore[misc]
    r"""Configuration of [`OBLRPOTrainer`]; every parameter of [`~trl.GRPOConfig`], and those below.

    Eight defaults differ from GRPOConfig's, so that a configuration in which nothing else is set is valid:
    `loss_type="luspo"`, `importance_sampling_level="sequence"`, `scale_rewards="none"`, `disable_dropout=True`,
    `gradient_accumulation_steps=8`, `lr_scheduler_type="constant"`, `vllm_importance_sampling_correction=False`,
    and `router_aux_loss_coef=0.0`.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS

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
    disable_dropout: bool = field(
        default=True, metadata={"help": "With dropout, the score is not that of the policy that sampled."}
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
            "help": "What is subtracted from each reward: `oblr` (the variance-optimal baseline, leave-one-out), "
            "`oblr_shrunk` (the same, shrunk towards other prompts and earlier steps), `rloo`, `js` "
            "or `none`. Baselines that look at the completion's own reward are refused, because they are biased."
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
            "help": "Factor on the learning rate: `auto` (measured from the updates themselves; `learning_rate` is "
            "only where it starts), `debiased` or `plugin` (the signal-to-noise ratio's), `kl`, or `off`."
        },
    )
    schedule_kl: float | None = field(
        default=None,
        metadata={
            "help": "Most nats per completion that a step of `auto` may take (None: 0.5); the target of `kl` (0.02)."
        },
    )

    def __post_init__(self) -> Any:
        super().__post_init__()
        if self.use_liger_kernel:  # type: ignore[has-type]
            LOGGER.warning("use_liger_kernel is ignored: its layers compute the same, but hide it from score norms.")
            self.use_liger_kernel = False
        check_config(self)
