"""Completions sampled from the policy by transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from oblrpo.errors import DivergedError
from oblrpo.policy import Policy, Sequences


@dataclass(frozen=True)
class Rollouts:
    """P x G completions; row p G + j is output j of prompt p."""

    sequences: Sequences
    completions: list[str]
    clipped_S: Tensor
    """Which completions were cut at the longest length."""


@torch.no_grad()
def sample(
    policy: Policy, prompts: list[str], num_generations: int, max_completion_length: int, temperature: float
) -> Rollouts:
    """G completions of every prompt from softmax(logits / temperature), with no truncation of the distribution.

    Uses torch's global random state.

    Raises:
        InputError: a prompt does not fit.
        DivergedError: the policy gives no probabilities any more.
        RuntimeError: as `generate` raises.
    """
    rows = policy.encode(prompts, room=max_completion_length)
    prompt_SQ, mask_SQ = (each.repeat_interleave(num_generations, 0) for each in policy.pad_prompts(rows))
    settings = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_completion_length,
        eos_token_id=policy.end_tokens,
        pad_token_id=policy.tokenizer.pad_token_id,
    )
    with _own_settings_only(policy.model):
        try:
            ids_ST = policy.model.generate(input_ids=prompt_SQ, attention_mask=mask_SQ, generation_config=settings)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise DivergedError("the policy's probabilities are no numbers any more; lower learning_rate.") from None
    completion_SC = ids_ST[:, prompt_SQ.shape[1] :]
    ended_SC = torch.isin(completion_SC, torch.tensor(policy.end_tokens, device=completion_SC.device))
    mask_SC = (ended_SC.cumsum(1) - ended_SC.long() == 0).long()  # up to and including the first end token
    texts = [
        policy.tokenizer.decode(row[kept.bool()], skip_special_tokens=True)
        for row, kept in zip(completion_SC.cpu(), mask_SC.cpu(), strict=True)
    ]
    return Rollouts(Sequences(prompt_SQ, mask_SQ, completion_SC, mask_SC), texts, ~ended_SC.any(1))


@contextmanager
def _own_settings_only(model: Any) -> Iterator[None]:
    """Keep a loaded model's generation defaults (top-p, repetition penalty ...) from changing the distribution."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept
