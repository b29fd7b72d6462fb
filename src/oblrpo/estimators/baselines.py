"""Baselines: what is subtracted from each output's reward.

A baseline that does not depend on the output it is subtracted from leaves the gradient unbiased (assumption 1) and
changes its variance only. Shapes: P prompts, G outputs a prompt; every function returns (P, G).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def none(rewards_PG: Tensor) -> Tensor:
    """B = 0. Unbiased. Williams 1992 (REINFORCE)."""
    return torch.zeros_like(rewards_PG)


def mean(rewards_PG: Tensor) -> Tensor:
    """B = mean_j F_j, the output itself included: (G - 1) / G times RLOO's gradient. Shao et al. 2024 (GRPO)."""
    return rewards_PG.mean(1, keepdim=True).expand_as(rewards_PG)


def rloo(rewards_PG: Tensor) -> Tensor:
    """b_j = mean_{i != j} F_i. Unbiased. Ahmadian et al. 2024, arXiv 2402.14740."""
    return _sum_of_others(rewards_PG) / (rewards_PG.shape[1] - 1)


def oblr(rewards_PG: Tensor, norm2_PG: Tensor) -> Tensor:
    """b_j = sum_{i != j} w_i F_i / sum_{i != j} w_i: the variance-optimal baseline, leave-one-out. Unbiased.

    It estimates b* = E[w F] / E[w], which minimises the trace of the gradient's covariance (OBLR-PO, theorem 7), from
    the outputs other than j. In leverage form, F_j - b_j = (F_j - b) / (1 - h_j) with b = sum w F / sum w and
    h_j = w_j / sum w; here 1 - h_j is summed from the others, so that a dominant w_j loses no digits. Where all other
    outputs have w = 0 the baseline is the limit for equal weights, RLOO's.

    Args:
        rewards_PG: F.
        norm2_PG: w, the squared score norms || grad log pi(o_j|q) ||^2 (of the importance-weighted score, rho^2 w,
            if outputs come from another policy).
    """
    others_PG = _sum_of_others(norm2_PG)
    weighted_PG = _sum_of_others(norm2_PG * rewards_PG) / others_PG
    return torch.where(others_PG > 0, weighted_PG, rloo(rewards_PG))


def oblr_crossfit(rewards_PG: Tensor, norm2_PG: Tensor) -> Tensor:
    """b_j = sum_{i not in fold(j)} w_i F_i / sum_{i not in fold(j)} w_i, folds of even and odd outputs. Unbiased.

    The same for all outputs of a fold, so that the gradient is a combination of three sums a prompt (`fold_basis`),
    which a backward can add up before any norm is known: `ScoreTape(method="folds")`. Half of the outputs estimate each
    baseline where `oblr` uses all but one. Where the other fold's w are all 0 the baseline is its mean reward.
    """
    even_G = _even(rewards_PG)
    result_PG = torch.empty_like(rewards_PG)
    for fold_G in (even_G, ~even_G):
        weights, rewards = norm2_PG[:, ~fold_G], rewards_PG[:, ~fold_G]
        total_P = weights.sum(1)
        baseline_P = torch.where(total_P > 0, (weights * rewards).sum(1) / total_P, rewards.mean(1))
        result_PG[:, fold_G] = baseline_P[:, None]
    return result_PG


def fold_basis(rewards_PG: Tensor) -> Tensor:
    """Columns (F_j - mean F, [j even], [j odd]), (P, G, 3): advantages under a baseline per fold are in their span.

    Less the mean, because large rewards of one sign would cancel in the sums. So are those of `none`, `mean`, `rloo`,
    `oblr_crossfit`: `Baseline.spanned`.
    """
    even_PG = _even(rewards_PG).to(rewards_PG.dtype).expand_as(rewards_PG)
    return torch.stack([rewards_PG - rewards_PG.mean(1, keepdim=True), even_PG, 1 - even_PG], -1)


def _even(rewards_PG: Tensor) -> Tensor:
    return torch.arange(rewards_PG.shape[1], device=rewards_PG.device) % 2 == 0


@dataclass(frozen=True)
class Baseline:
    """An entry of `BASELINES`."""

    function: Callable[..., Tensor]
    unbiased: bool
    """Whether the policy gradient's mean is exactly grad J with it."""
    smallest_group: int
    """The fewest outputs a prompt it is defined for."""
    spanned: bool = True
    """Whether its advantages are combinations of `fold_basis`."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the inputs beyond the rewards."""
        return tuple(inspect.signature(self.function).parameters)[1:]


BASELINES: dict[str, Baseline] = {
    "none": Baseline(none, unbiased=True, smallest_group=1),
    "mean": Baseline(mean, unbiased=False, smallest_group=1),
    "rloo": Baseline(rloo, unbiased=True, smallest_group=2),
    "oblr": Baseline(oblr, unbiased=True, smallest_group=2, spanned=False),
    "oblr_crossfit": Baseline(oblr_crossfit, unbiased=True, smallest_group=2),
}


def baseline(name: str, rewards_PG: Tensor, **inputs: Tensor) -> Tensor:
    """The named baseline of every output, shape (P, G), computed in float64 and returned in the rewards' dtype.

    Args:
        name: a key of `BASELINES`.
        rewards_PG: (P, G) finite rewards.
        **inputs: what the baseline needs, each (P, G), such as `norm2_PG`; inputs that only others need may be there.

    Raises:
        ValueError: an unknown name, a missing, unknown, misshapen, non-finite or negative input, or too few outputs a
            prompt.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; choose one of: {', '.join(BASELINES)}.")
    entry = BASELINES[name]
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards_PG must have shape (prompts, outputs a prompt), got {tuple(rewards_PG.shape)}.")
    if rewards_PG.shape[1] < entry.smallest_group:
        raise ValueError(
            f"baseline {name!r} needs at least {entry.smallest_group} outputs a prompt, got {rewards_PG.shape[1]}."
        )
    known = {need for each in BASELINES.values() for need in each.needs}
    if missing := [need for need in entry.needs if need not in inputs]:
        raise ValueError(f"baseline {name!r} needs {', '.join(missing)}.")
    if unknown := set(inputs) - known:
        raise ValueError(f"no baseline takes {', '.join(sorted(unknown))}; inputs are: {', '.join(sorted(known))}.")
    for key, value in {"rewards_PG": rewards_PG, **inputs}.items():
        if value.shape != rewards_PG.shape:
            raise ValueError(f"{key} has shape {tuple(value.shape)}, rewards_PG {tuple(rewards_PG.shape)}.")
        if not value.isfinite().all():
            raise ValueError(f"{key} holds NaN or infinity.")
        if key == "norm2_PG" and (value < 0).any():
            raise ValueError("norm2_PG holds a negative squared norm.")
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.get_default_dtype()
    return entry.function(rewards_PG.double(), **{key: inputs[key].double() for key in entry.needs}).to(dtype)


def _sum_of_others(values_PG: Tensor) -> Tensor:
    """sum_{i != j} v_i, as a sum of what comes before and what comes after j: nothing is subtracted, in O(G)."""
    zero_P1 = torch.zeros_like(values_PG[:, :1])
    before_PG = torch.cat([zero_P1, values_PG.cumsum(1)[:, :-1]], 1)
    after_PG = torch.cat([values_PG.flip(1).cumsum(1).flip(1)[:, 1:], zero_P1], 1)
    return before_PG + after_PG
