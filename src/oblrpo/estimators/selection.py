"""Which outputs to train on: sampling an output and training on it are two costs, and most outputs hardly pull.

Let a_j be what multiplies the score s_j in the batch gradient, w_j = ||s_j||^2, and c_j what it costs to put output j
through the model. If output j is kept with probability p_j and then counts 1/p_j times, the gradient keeps its mean,
whatever p_j depends on, and gains the variance sum_j (1/p_j - 1) a_j^2 w_j. Of all p with the same expected cost
sum_j p_j c_j that is least at p_j = min(1, kappa |a_j| sqrt(w_j / c_j)) (Neyman 1934). An output with a_j = 0 has
p_j = 0, and nothing is lost. Derived for this project; a poor estimate of w_j costs variance, never bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_CHANCE = 0.05
"""The least p_j of an output with a_j other than 0: no output counts more than twenty times."""
HALVINGS = 60
"""Steps of the bisection for kappa, on its logarithm."""


@dataclass(frozen=True)
class Chances:
    """The chances p of being kept, and what they cost and save in expectation."""

    chance_PG: Tensor
    """p_j; 0 where the coefficient is 0."""
    added: float
    """The variance that leaving out adds, over sum_j a_j^2 w_j."""
    cost: float
    """The expected cost over that of all outputs."""


def chances_for_share(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor, share: float) -> Chances:
    """The p of least variance whose expected cost is this share of all outputs'; all that pull, if they cost less.

    Args:
        coef_PG: what multiplies each score in the gradient, a_j.
        norm2_PG: squared score norms w_j, or a proxy of them of any scale.
        cost_PG: the cost c_j of each output, positive, in any unit.
        share: the share of sum_j c_j that may be spent, in (0, 1].

    Raises:
        ValueError: the share is out of range, or shapes, norms or costs do not fit.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of outputs to train on must lie in (0, 1], got {share}.")
    return _bisect(coef_PG, norm2_PG, cost_PG, lambda found: found.cost <= share)


def chances_for_tolerance(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor, tolerance: float) -> Chances:
    """The cheapest p that add at most this share of sum_j a_j^2 w_j to the gradient's variance.

    Args:
        coef_PG: as in `chances_for_share`.
        norm2_PG: the same.
        cost_PG: the same.
        tolerance: the added variance allowed, at least 0; 0 keeps all that pull.

    Raises:
        ValueError: the tolerance is negative, or as `chances_for_share` says.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"the variance that may be added must be at least 0, got {tolerance}.")
    if not tolerance:
        return _at(math.inf, *_checked(coef_PG, norm2_PG, cost_PG))
    return _bisect(coef_PG, norm2_PG, cost_PG, lambda found: found.added > tolerance)


def chances_of_least_work(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor, sampling: float) -> Chances:
    """The p for which variance times cost is least, so that most is learned for the work of sampling and training.

    (1 + added) (sampling + sum_j p_j c_j): so many steps more make up for the noise that each has more.

    Args:
        coef_PG: as in `chances_for_share`.
        norm2_PG: the same.
        cost_PG: the same.
        sampling: what sampling the batch costs, in the unit of cost_PG.

    Raises:
        ValueError: sampling costs less than nothing, or as `chances_for_share` says.
    """
    if not 0 <= sampling < math.inf:
        raise ValueError(f"sampling must cost at least 0, got {sampling}.")
    checked = _checked(coef_PG, norm2_PG, cost_PG)
    coef_N, norm2_N, cost_N = (each.flatten() for each in checked)
    low, high = _range(*checked)
    kappa_K = torch.linspace(low, high, 201, dtype=torch.float64, device=coef_N.device).exp()
    # All of them at once, because this is done in every step; as `_at`, of which the best makes the result.
    pull_N, square_N = coef_N.abs() * (norm2_N / cost_N).sqrt(), coef_N.square() * norm2_N
    chance_KN = torch.where(coef_N != 0, (kappa_K[:, None] * pull_N).clamp(LEAST_CHANCE, 1), 0)
    added_K = ((1 / chance_KN.clamp(min=LEAST_CHANCE) - 1) @ square_N) / square_N.sum().clamp(min=1e-300)
    best = int(((1 + added_K) * (sampling + chance_KN @ cost_N)).argmin())
    return _at(float(kappa_K[best]), *checked)


def systematic(chance_PG: Tensor, uniform_P1: Tensor) -> Tensor:
    """Draw outputs with these chances, as even a number of each prompt as can be, prompts independently; a mask.

    Output j of a prompt is kept if a whole number lies between u + p_1 + ... + p_(j-1) and u + p_1 + ... + p_j.

    Args:
        chance_PG: the chances p.
        uniform_P1: one number u from [0, 1) a prompt.
    """
    ends_PG = chance_PG.double().cumsum(1) + uniform_P1.double()
    starts_PG = torch.cat([uniform_P1.double(), ends_PG[:, :-1]], 1)
    return ((ends_PG.floor() > starts_PG.floor()) | (chance_PG >= 1)) & (chance_PG > 0)


def added_variance(chance_PG: Tensor, coef_PG: Tensor, gram_PGG: Tensor) -> float:
    """The variance that drawing by `systematic` adds to the gradient sum_j a_j s_j, exactly.

    A draw's gradient is off by d = sum_j (n_j - 1) a_j s_j, where n_j is 1 / p_j or 0. Prompts draw independently and
    the mean of d is 0, so that this is the sum over prompts of E ||d||^2, over the few draws that u can lead to.

    Args:
        chance_PG: the chances p.
        coef_PG: the coefficients a_j; 0 where p_j is 0.
        gram_PGG: the inner products <s_j, s_k> of each prompt's scores, or unbiased estimates of them.
    """
    chance_PG, coef_PG, gram_PGG = chance_PG.double(), coef_PG.double(), gram_PGG.double()
    edges_PN = torch.cat([-chance_PG.cumsum(1) % 1, torch.zeros_like(chance_PG[:, :1])], 1).sort(1).values
    edges_PN = torch.cat([edges_PN, torch.ones_like(edges_PN[:, :1])], 1)  # between two of them u leads to one draw
    total = 0.0
    for low_P, high_P in itertools.pairwise(edges_PN.T):
        kept_PG = systematic(chance_PG, (low_P + high_P)[:, None] / 2)
        off_PG = (kept_PG / chance_PG.clamp(min=1e-9) - 1) * coef_PG
        total += float((high_P - low_P) @ torch.einsum("pj,pjk,pk->p", off_PG, gram_PGG, off_PG))
    return total


def _checked(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not coef_PG.shape == norm2_PG.shape == cost_PG.shape:
        raise ValueError(f"shapes differ: {tuple(coef_PG.shape)}, {tuple(norm2_PG.shape)}, {tuple(cost_PG.shape)}.")
    coef_PG, norm2_PG, cost_PG = (each.detach().double() for each in (coef_PG, norm2_PG, cost_PG))
    if not coef_PG.isfinite().all() or not norm2_PG.isfinite().all() or (norm2_PG < 0).any() or (cost_PG <= 0).any():
        raise ValueError("coefficients must be finite, squared norms at least 0, and costs positive.")
    return coef_PG, norm2_PG, cost_PG


def _at(kappa: float, coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor) -> Chances:
    pulls_PG, pull_PG = coef_PG != 0, coef_PG.abs() * (norm2_PG / cost_PG).sqrt()
    chance_PG = (pull_PG * kappa).clamp(LEAST_CHANCE, 1) if kappa < math.inf else torch.ones_like(pull_PG)
    chance_PG = torch.where(pulls_PG, chance_PG, 0)
    square_PG = coef_PG.square() * norm2_PG
    added_PG = torch.where(pulls_PG, (1 / chance_PG.clamp(min=LEAST_CHANCE) - 1) * square_PG, 0)
    whole = float(square_PG.sum())
    added = float(added_PG.sum()) / whole if whole else 0.0
    return Chances(chance_PG, added, float((chance_PG * cost_PG).sum() / cost_PG.sum()))


def _range(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor) -> tuple[float, float]:
    """Logarithms of the kappa below which every p is the least, and of that from which on all are 1."""
    pull_N = (coef_PG.abs() * (norm2_PG / cost_PG).sqrt()).flatten()
    pull_N = pull_N[pull_N > 0]
    if not len(pull_N):
        return 0.0, 0.0
    return math.log(LEAST_CHANCE / float(pull_N.max())), -math.log(float(pull_N.min()))


def _bisect(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor, may_grow: Callable[[Chances], bool]) -> Chances:
    """The p of the greatest kappa up to which kappa may grow."""
    checked = _checked(coef_PG, norm2_PG, cost_PG)
    low, high = _range(*checked)
    if may_grow(_at(math.exp(high), *checked)):
        return _at(math.exp(high), *checked)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if may_grow(_at(math.exp(middle), *checked)) else (low, middle)
    return _at(math.exp(high), *checked)
