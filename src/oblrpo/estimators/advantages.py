"""From reward minus baseline to the coefficient of each output's score: normalisations and loss weightings.

An algorithm is a baseline, one of these of each kind, and a schedule; see `oblrpo.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GROUP_STD_EPSILON = 1e-4
"""TRL's and verl's order of magnitude; with 0/1 rewards it matters only where all rewards of a group are equal."""


def unnormalised(advantages_PG: Tensor, rewards_PG: Tensor) -> Tensor:
    """A = F - b, as the policy-gradient theorem has it."""
    return advantages_PG


def by_group_std(advantages_PG: Tensor, rewards_PG: Tensor) -> Tensor:
    """A = (F - b) / (std_j F_j + 1e-4), with the standard deviation over G - 1.

    A prompt's weight depends on its rewards, so the gradient is that of another objective. Shao et al. 2024 (GRPO),
    arXiv 2402.03300.

    Raises:
        ValueError: one output a prompt.
    """
    if rewards_PG.shape[1] < 2:
        raise ValueError("the group's standard deviation needs at least 2 outputs a prompt.")
    return advantages_PG / (rewards_PG.std(1, keepdim=True) + GROUP_STD_EPSILON)


NORMALISATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"none": unnormalised, "group_std": by_group_std}


def per_sequence(lengths_PG: Tensor, longest: int) -> Tensor:
    """1: the coefficient of grad log pi(o|q) is A, the policy gradient itself (OBLR-PO, RLOO)."""
    return torch.ones_like(lengths_PG)


def per_token_of_sequence(lengths_PG: Tensor, longest: int) -> Tensor:
    """1 / |o|: every output's tokens are averaged (GRPO); short outputs weigh more a token."""
    return 1 / lengths_PG.clamp(min=1)


def per_token_of_batch(lengths_PG: Tensor, longest: int) -> Tensor:
    """P G / sum |o|: all tokens of the batch weigh the same (DAPO, arXiv 2503.14476)."""
    return torch.full_like(lengths_PG, 1) / lengths_PG.mean().clamp(min=1)


def per_constant(lengths_PG: Tensor, longest: int) -> Tensor:
    """1 / longest allowed |o|: the policy gradient up to a constant (Dr. GRPO, arXiv 2503.20783)."""
    return torch.full_like(lengths_PG, 1 / longest)


WEIGHTINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sequence": per_sequence,
    "sequence_mean": per_token_of_sequence,
    "token_mean": per_token_of_batch,
    "constant": per_constant,
}
"""Factor of each output's advantage, from lengths_PG (tokens, a float tensor) and the longest length allowed."""
