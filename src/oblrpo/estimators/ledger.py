"""The variance ledger: what the noise of this very batch's gradient would have been under each baseline.

From the Gram matrix of the batch's score vectors, K = <s_a, s_b> over all pairs of outputs (exact or from random
projections: `ScoreTape.gram`, `ScoreTape.sketch`), every baseline's prompt gradients g_i = (1/G) sum_j A_ij s_ij have
their inner products M_ik = <g_i, g_k> = (1/G^2) A_i' K_ik A_k. Nothing else is needed, and no further backward.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.estimators.advantages import NORMALISATIONS, advantages
from oblrpo.estimators.baselines import Prior, baseline
from oblrpo.estimators.moments import own_norm2
from oblrpo.tables.baselines import BASELINES


@dataclass(frozen=True)
class LedgerEntry:
    """What the batch gradient's noise and signal are with one baseline. Units: squared gradient norm."""

    variance: float
    """The estimate (1 / (P (P - 1))) sum_i ||g_i - g||^2 of tr Cov of the batch gradient. It is unbiased for a baseline
    that looks at its own prompt alone, and off by order 1 / P of itself for one that looks at others."""
    signal2: float
    """The estimate sum_{i != k} M_ik / (P (P - 1)) of the squared norm of its mean. It is unbiased where `variance` is,
    and else too high by what that is too low; it may be negative by chance."""


@dataclass(frozen=True)
class Ledger:
    """The entries of all baselines on one batch."""

    entries: dict[str, LedgerEntry]
    between: float
    """The part of an unbiased baseline's variance that comes from drawing prompts, tr Cov(mu_q) / P; it may be
    negative by chance."""


def under_every_baseline(
    rewards_PG: Tensor,
    inputs: Mapping[str, Tensor],
    *,
    valid_PG: Tensor | None = None,
    rho_PG: Tensor | None = None,
    prior: Prior | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """The advantages under every baseline of `BASELINES` that these groups allow, and what its authors divide them by.

    The arguments are those of `baseline`, `inputs` as `baseline_inputs` gathers them; baselines that need more are left
    out. It is, for every name, F - b, (P, G), or (P, G, T) where b is one number a token; and the divisor, (P, G).
    """
    measured, under = {*inputs, "prior"}, {}
    for name, entry in BASELINES.items():
        if entry.smallest_group <= rewards_PG.shape[1] and measured.issuperset(entry.needs):
            b = baseline(name, rewards_PG, valid_PG=valid_PG, rho_PG=rho_PG, prior=prior, **inputs)
            under[name] = advantages(rewards_PG, b), NORMALISATIONS[entry.normalisation](rewards_PG, valid_PG)
    return under


def ledger(
    gram_SS: Tensor,
    coefs_PG: Mapping[str, Tensor],
    rewards_PG: Tensor,
    unbiased: Mapping[str, bool],
    gram_of: Mapping[str, Tensor] | None = None,
    valid_PG: Tensor | None = None,
) -> Ledger:
    """Signal and noise of the gradient under several advantages, on one batch of P prompts with G outputs each.

    H = Cov(g_i) is the covariance of one prompt's gradient; prompts are independent, so that the sample covariance of
    the g_i is unbiased whatever the baseline does within a prompt (one that looks at other prompts makes them depend on
    each other: an error of order 1 / P of the variance). Given the prompt, the mean gradient mu_q of every unbiased
    baseline is the same, and what drawing prompts brings is (E ||mu_q||^2 - ||E mu_q||^2) / P (`own_norm2`).

    Args:
        gram_SS: inner products of scores, S = P G, outputs of a prompt together: exact or unbiased estimates, (S, S),
            or several of these, (K, S, S), whose mean is used.
        coefs_PG: the advantages A, by name.
        rewards_PG: the rewards F.
        unbiased: whether the mean gradient is the policy gradient given any prompt, by name.
        gram_of: inner products to be used instead (those of token-weighted scores), by name.
        valid_PG: outputs that count (all if None); g_i is the mean over those of its prompt. What stands in the other
            places is ignored.

    Raises:
        ValueError: fewer than two prompts, shapes that do not fit, advantages of which `unbiased` says nothing, or a
            prompt without a valid output.
    """
    P, G = rewards_PG.shape
    if P < 2:
        raise ValueError("the ledger needs at least 2 prompts.")
    valid_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if valid_PG is None else valid_PG.bool()
    if valid_PG.shape != rewards_PG.shape or not valid_PG.any(1).all():
        raise ValueError("valid_PG must have the rewards' shape and a valid output for every prompt.")
    if missing := set(coefs_PG) - set(unbiased):
        raise ValueError(f"unbiased does not say whether {', '.join(sorted(missing))} is.")
    grams = {name: _by_prompt(name, gram, valid_PG) for name, gram in {"gram_SS": gram_SS, **(gram_of or {})}.items()}
    rewards_PG = torch.where(valid_PG, rewards_PG.double(), 0)
    entries = {}
    for name, coef_PG in coefs_PG.items():
        if coef_PG.shape != (P, G):
            raise ValueError(f"{name}: advantages of shape {tuple(coef_PG.shape)}, rewards {(P, G)}.")
        entries[name] = _entry(grams.get(name, grams["gram_SS"]), coef_PG, valid_PG)
    between = math.nan
    if any(unbiased[name] for name in coefs_PG):  # of the reward less the others' mean, which no shift of F moves
        others_PG = (valid_PG.sum(1, keepdim=True) - 1).clamp(min=1)
        centred_PG = rewards_PG - (rewards_PG.sum(1, keepdim=True) - rewards_PG) / others_PG  # 0 for a lone output
        mu2 = own_norm2(grams["gram_SS"].diagonal(dim1=0, dim2=2).permute(2, 0, 1), rewards_PG, valid_PG)
        between = (mu2 - _entry(grams["gram_SS"], centred_PG, valid_PG).signal2) / P
    return Ledger(entries, between)


def _by_prompt(name: str, gram: Tensor, valid_PG: Tensor) -> Tensor:
    """The inner products, (P, G, P, G), with 0 where an output does not count; of several estimates their mean."""
    P, G = valid_PG.shape
    if gram.shape[-2:] != (P * G, P * G) or gram.ndim not in {2, 3}:
        raise ValueError(f"{name} has shape {tuple(gram.shape)}, not ({P * G}, {P * G}), nor several of them.")
    both = valid_PG.flatten()[:, None] & valid_PG.flatten()
    return torch.where(both, gram.double().reshape(-1, P * G, P * G).mean(0), 0).view(P, G, P, G)


def _entry(gram_PGPG: Tensor, coef_PG: Tensor, valid_PG: Tensor) -> LedgerEntry:
    """From the inner products <g_i, g_k> of the prompts' gradients, (P, P)."""
    coef_PG = torch.where(valid_PG, coef_PG.double(), 0) / valid_PG.sum(1, keepdim=True)
    inner_PP = torch.einsum("ij,ijkl,kl->ik", coef_PG, gram_PGPG, coef_PG)
    P, total, diagonal = len(inner_PP), float(inner_PP.sum()), float(inner_PP.diagonal().sum())
    return LedgerEntry(variance=(diagonal / P - total / P**2) / (P - 1), signal2=(total - diagonal) / (P * (P - 1)))
