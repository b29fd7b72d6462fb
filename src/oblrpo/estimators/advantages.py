"""From reward minus baseline to the coefficient of each output's score: normalisations and loss weightings.

An algorithm is a baseline, one of these of each kind, and a schedule; see `oblrpo.algorithms`. The divisor of a
normalisation depends on the rewards, so that the gradient is that of another objective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""A small number of the size that TRL and verl add; with 0/1 rewards it matters only where all rewards are equal."""


def advantages(rewards_PG: Tensor, baseline: Tensor, valid_PG: Tensor | None = None) -> Tensor:
    """The advantages A = F - b, and 0 where an output does not count; (P, G), or (P, G, T) of one baseline a token.

    What a normalisation divides them by is never part of them.
    """
    if baseline.ndim == 3:
        rewards_PG, valid_PG = rewards_PG[..., None], None if valid_PG is None else valid_PG[..., None]
    return rewards_PG - baseline if valid_PG is None else torch.where(valid_PG.bool(), rewards_PG - baseline, 0)


def unnormalised(rewards_PG: Tensor, valid_PG: Tensor | None = None) -> Tensor:
    """The divisor 1: A = F - b, as the policy-gradient theorem has it."""
    return torch.ones_like(rewards_PG)


def group_std(rewards_PG: Tensor, valid_PG: Tensor | None = None) -> Tensor:
    """The standard deviation (over G - 1) of each prompt's valid rewards, plus 1e-4.

    Source: Shao et al. 2024 (GRPO), arXiv 2402.03300.

    Raises:
        ValueError: there is one output a prompt.
    """
    if rewards_PG.shape[1] < 2:
        raise ValueError("the group's standard deviation needs at least 2 outputs per prompt.")
    return (_std(rewards_PG, valid_PG, 1) + STD_EPSILON).expand_as(rewards_PG)


def batch_std(rewards_PG: Tensor, valid_PG: Tensor | None = None) -> Tensor:
    """The standard deviation of all valid rewards of the batch, plus 1e-4.

    Source: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262.

    Raises:
        ValueError: there is a single reward.
    """
    if rewards_PG.numel() < 2:
        raise ValueError("the batch's standard deviation needs at least 2 rewards.")
    return (_std(rewards_PG, valid_PG, (0, 1)) + STD_EPSILON).expand_as(rewards_PG)


def _std(rewards_PG: Tensor, valid_PG: Tensor | None, over: int | tuple[int, int]) -> Tensor:
    """The standard deviation of valid values, over n - 1; it is 0 of fewer than two."""
    if valid_PG is None or bool(valid_PG.all()):
        return rewards_PG.std(over, keepdim=True)
    count = valid_PG.sum(over, keepdim=True)
    rewards_PG = torch.where(valid_PG.bool(), rewards_PG, 0)
    centred_PG = (rewards_PG - rewards_PG.sum(over, keepdim=True) / count.clamp(min=1)) * valid_PG
    return (centred_PG.square().sum(over, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


NORMALISATIONS: dict[str, Callable[..., Tensor]] = {
    "none": unnormalised,
    "group_std": group_std,
    "batch_std": batch_std,
}
"""The divisors of advantages by name: functions of the whole batch's rewards and, if given, of which of them count."""

SMALLEST_GROUP = {"group_std": 2}
"""The fewest valid outputs of a prompt that a normalisation compares, where that is more than 1."""


def per_sequence(lengths_PG: Tensor, longest: int, valid_PG: Tensor | None = None) -> Tensor:
    """The factor 1: the coefficient of grad log pi(o|q) is A, the policy gradient itself (OBLR-PO, RLOO)."""
    return torch.ones_like(lengths_PG)


def per_token_of_sequence(lengths_PG: Tensor, longest: int, valid_PG: Tensor | None = None) -> Tensor:
    """The factor 1 / |o|: every output's tokens are averaged (GRPO); short outputs weigh more a token."""
    return 1 / lengths_PG.clamp(min=1)


def per_token_of_batch(lengths_PG: Tensor, longest: int, valid_PG: Tensor | None = None) -> Tensor:
    """The factor P G / sum |o|: all tokens of the batch weigh the same (DAPO, arXiv 2503.14476).

    Where prompt i has G_i valid outputs it is P G_i / sum |o|, because the mean over them divides by G_i again. Here P
    counts the prompts with a valid output, and the sum runs over valid outputs.
    """
    if valid_PG is None or bool(valid_PG.all()):
        return torch.full_like(lengths_PG, 1) / lengths_PG.mean().clamp(min=1)
    count_P1 = valid_PG.sum(1, keepdim=True).to(lengths_PG)
    prompts, tokens = (count_P1 > 0).sum(), (lengths_PG * valid_PG).sum()
    return (prompts * count_P1 / tokens.clamp(min=1)).expand_as(lengths_PG)


def per_constant(lengths_PG: Tensor, longest: int, valid_PG: Tensor | None = None) -> Tensor:
    """The factor 1 / longest allowed |o|: the policy gradient up to a constant (Dr. GRPO, arXiv 2503.20783)."""
    return torch.full_like(lengths_PG, 1 / longest)


WEIGHTINGS: dict[str, Callable[..., Tensor]] = {
    "sequence": per_sequence,
    "sequence_mean": per_token_of_sequence,
    "token_mean": per_token_of_batch,
    "constant": per_constant,
}
"""The factors of advantages by name: functions of lengths_PG (tokens, a float tensor), of the longest length allowed
and, if given, of which outputs count."""
