"""What sampling gives, whoever samples, and what a sampler is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oblrpo.policy import Policy, Prompt, Sequences


@dataclass(frozen=True)
class Rollouts:
    """P x G completions; row p G + j is output j of prompt p."""

    sequences: Sequences
    completions: list[str]
    clipped_S: Tensor
    """Which completions were cut at the longest length."""
    sampler_logps_SC: Tensor | None = None
    """Log-probability of each token under the distribution it was drawn from, nats, where the sampler tells; whatever
    stands where there is no token."""


class Sampler(Protocol):
    """Draws completions from softmax(logits / temperature) of a policy, with no truncation of the distribution."""

    def sample(
        self, prompts: Sequence[Prompt], num_generations: int, max_completion_length: int, temperature: float
    ) -> Rollouts:
        """G completions of every prompt; what is random follows from torch's global random state.

        Raises:
            InputError: a prompt does not fit, or the policy is broken.
        """
        ...

    def sync(self, policy: Policy) -> None:
        """Sample from these weights from now on: after every change of the policy.

        Raises:
            InputError: the sampler cannot take them over.
        """
        ...


def texts_of(policy: Policy, completion_SC: Tensor, mask_SC: Tensor) -> list[str]:
    """The completions as text, without special tokens."""
    return [
        policy.tokenizer.decode(row[kept.bool()], skip_special_tokens=True)
        for row, kept in zip(completion_SC.cpu(), mask_SC.cpu(), strict=True)
    ]


def ended(policy: Policy, completion_SC: Tensor) -> Tensor:
    """Which tokens end a completion."""
    return torch.isin(completion_SC, torch.tensor(policy.end_tokens, device=completion_SC.device))
