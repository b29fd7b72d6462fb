"""From reward minus baseline to the coefficient of each output's score: normalisations and loss weightings.

An algorithm is a baseline, one of these of each kind, a schedule and a ratio: `oblrpo.tables.algorithms`. The divisor
of a normalisation depends on the rewards, so that the gradient is that of another objective.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""A small number of the size that TRL and verl add; with 0/1 rewards it matters only where all rewards are equal."""

ROUNDING = 2 * torch.finfo(torch.float32).eps
"""How far equal rewards may lie apart, as a share of the largest: float32 rounds the terms of a sum and the sum itself,
each by at most eps / 2, in either of the two. Terms that cancel, as with a penalty, are rounded by more."""


def advantages(rewards_PG: Tensor, baseline: Tensor, valid_PG: Tensor | None = None) -> Tensor:
    """The advantages A = F - b, and 0 where an output does not count; (P, G), or (P, G, T) of one baseline a token.

    What a normalisation divides them by is never part of them.
    """
    if baseline.ndim == 3:
        rewards_PG, valid_PG = rewards_PG[..., None], None if valid_PG is None else valid_PG[..., None]
    return rewards_PG - baseline if valid_PG is None else torch.where(valid_PG.bool(), rewards_PG - baseline, 0)


def differ(rewards_PG: Tensor, valid_PG: Tensor) -> bool:
    """Whether any reward that counts differs from another by more than `ROUNDING`; if none does, no step is made.

    Scores have the mean 0, so that what a batch of equal rewards says is all but noise: what a baseline remembers of
    other batches times the mean score. With rewards of 0 and 1, 1 with the chance p, and a remembered b, leaving such
    batches out takes the share P(all 0) b / (1 - p) + P(all 1) (1 - b) / p off the gradient's mean. Where b is what the
    policy earns that is less than p, or 1 - p; with a baseline of the group alone it is 0.
    """
    rewards_N = rewards_PG[valid_PG].double()
    return bool(rewards_N.max() - rewards_N.min() > ROUNDING * rewards_N.abs().max()) if len(rewards_N) else False


def headroom(rewards_PG: Tensor, valid_PG: Tensor) -> float:
    """The least nats an output by which a policy must move to earn all that is left: (max F - mean F)^2 / (2 Var F).

    J(pi') - J(pi) = E[F (pi'/pi - 1)] is at most sd(F) sqrt(E[(pi'/pi - 1)^2]), about sd(F) sqrt(2 KL), and there is
    no more to gain than the best reward of the batch less its mean. Where one output of n fails and the others earn
    all there is, it is 1 / (2 (n - 1)); where one succeeds, (n - 1) / 2. It is infinite where all rewards are equal.
    """
    rewards_N = rewards_PG[valid_PG].double()
    left, variance = float(rewards_N.max() - rewards_N.mean()), float(rewards_N.var(correction=0))
    return left**2 / (2 * variance) if variance else math.inf


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
