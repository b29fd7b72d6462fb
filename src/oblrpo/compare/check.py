"""Whether the runs of a comparison can work, found out before the first of them starts."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig

from oblrpo.config import PolicyConfig, TrainConfig
from oblrpo.errors import InputError
from oblrpo.trainer.loop import Trainer
from oblrpo.trainer.setup import check

STAND_IN = PolicyConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=2**20)
"""A policy in place of a named model, which is too large to be loaded for a check."""


def check_settings(config: TrainConfig) -> None:
    """Refuse settings that no run can have, at hardly any cost.

    Raises:
        InputError: names the setting.
    """
    check(config)


def check_whole(config: TrainConfig) -> None:
    """Build the run, with a small policy in place of a named model, and let it go: task, optimizer, schedule, prompts.

    Raises:
        InputError: as `Trainer` raises, or the model is not there.
    """
    policy = config.policy
    if policy.model:
        try:
            AutoConfig.from_pretrained(policy.model, trust_remote_code=policy.trust_remote_code)
        except Exception as error:  # transformers raises many kinds; all mean that this model cannot be had
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise InputError(f"cannot find the model {policy.model!r}: {reason}.") from None
        config = replace(config, policy=replace(STAND_IN, device=policy.device))
    Trainer(config)
