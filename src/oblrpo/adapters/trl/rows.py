"""TRL's model and rows as the rest of the house takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo.policy import Policy, Sequences

MASKS = ("completion_mask", "tool_mask")
"""What TRL's batch says of tokens."""


def policy_of(trainer: Any) -> Policy:
    """A trainer's model with its tokenizer; the head is looked at before accelerate wraps the model's forward."""
    policy = Policy(
        trainer.model,
        trainer.processing_class,
        bf16=trainer.accelerator.mixed_precision == "bf16",
        checkpointing=trainer.args.gradient_checkpointing,
    )
    with in_eval_mode(trainer.model):
        _ = policy.head
    return policy


def own_SC(inputs: dict[str, Tensor]) -> Tensor:
    """Which tokens of a batch of TRL's are the policy's own: those of a completion but what tools have said."""
    mask_SC = inputs["completion_mask"]
    return mask_SC * inputs["tool_mask"] if "tool_mask" in inputs else mask_SC


def sequences_of(inputs: dict[str, Tensor]) -> Sequences:
    """The rows of a batch of TRL's, without the padding that only other rows needed."""
    padded = Sequences.of(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], inputs["completion_mask"]
    )
    own_ST = torch.cat([torch.zeros_like(inputs["prompt_mask"]), own_SC(inputs)], 1)
    return Sequences(padded.ids_ST, padded.mask_ST, own_ST, padded.start).at(slice(None))


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while; every module gets back the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
