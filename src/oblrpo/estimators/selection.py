"""Which outputs to train on: sampling an output and training on it are two costs, and most outputs hardly pull.

Let a_j be what multiplies the score s_j in the batch gradient, w_j = ||s_j||^2, and c_j what it costs to put output j
through the model. If output j is kept with probability p_j and then counts 1/p_j times, the gradient keeps its mean,
whatever p_j depends on, and gains the variance sum_j (1/p_j - 1) a_j^2 w_j. Of all p with the same expected cost
sum_j p_j c_j that is least at p_j = min(1, kappa |a_j| sqrt(w_j / c_j)) (Neyman 1934). An output with a_j = 0 has
p_j = 0, and nothing is lost. Derived for this project; a poor estimate of w_j costs variance, never bias.

Prompts draw independently (`systematic`), and a batch of which nothing is kept is drawn again (`draw_outputs`). With
the chance N = prod_i max(0, 1 - sum_j p_ij) of that, output j is kept with chance p_j / (1 - N) and counts (1 - N) /
p_j times.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_CHANCE = 0.05
"""The least p_j of an output with a_j other than 0: no output counts more than twenty times."""


@dataclass(frozen=True)
class Chances:
    """The chances p of being kept, and what they cost and save in expectation."""

    chance_PG: Tensor
    """p_j of one draw; 0 where the coefficient is 0. `draw_outputs` keeps with the chances p_j / (1 - nothing)."""
    nothing: float
    """The chance N that one draw keeps nothing, and is made again; 0 where nothing pulls."""
    added: float
    """The variance that leaving out adds, over sum_j a_j^2 w_j, once something is kept."""
    cost: float
    """The expected cost over that of all outputs, once something is kept: at least one output's."""


def chances_of_least_work(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor, sampling: float) -> Chances:
    """The p for which variance times cost is least, so that most is learned for the work of sampling and training.

    (1 + added) (sampling + sum_j p_j c_j): so many steps more make up for the noise that each has more.

    Args:
        coef_PG: what multiplies each score in the gradient, a_j.
        norm2_PG: squared score norms w_j, or a proxy of them of any scale.
        cost_PG: the cost c_j of each output, positive, in any unit.
        sampling: what sampling the batch costs, in the unit of cost_PG.

    Raises:
        ValueError: sampling costs less than nothing, or shapes, norms or costs do not fit.
    """
    if not 0 <= sampling < math.inf:
        raise ValueError(f"sampling must cost at least 0, got {sampling}.")
    checked = _checked(coef_PG, norm2_PG, cost_PG)
    coef_N, norm2_N, cost_N = (values_PG.flatten() for values_PG in checked)
    low, high = _range(*checked)
    kappa_K = torch.linspace(low, high, 201, dtype=torch.float64, device=coef_N.device).exp()
    # All of them at once, because this is done in every step; as `_at`, of which the best makes the result.
    pull_N, square_N = coef_N.abs() * (norm2_N / cost_N).sqrt(), coef_N.square() * norm2_N
    chance_KN = torch.where(coef_N != 0, (kappa_K[:, None] * pull_N).clamp(LEAST_CHANCE, 1), 0)
    chance_KN = chance_KN / (1 - nothing_kept(chance_KN.view(-1, *coef_PG.shape)))[:, None].clamp(min=LEAST_CHANCE)
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


def nothing_kept(chance_PG: Tensor) -> Tensor:
    """The chance N = prod_i max(0, 1 - sum_j p_ij) that `systematic` keeps nothing, (...) for chances (..., P, G)."""
    return (1 - chance_PG.double().sum(-1)).clamp(min=0).prod(-1)


def draw_outputs(chance_PG: Tensor) -> Tensor:
    """Draw by `systematic` until something is kept; how many times each output counts, (P, G): 0 or (1 - N) / p_j.

    The mean of that over all draws is 1 wherever p_j > 0, so that sum_j n_j a_j s_j keeps its mean. The numbers come
    from torch's global random state. Where all p are 0 nothing is drawn.

    Two outputs of different prompts both count, on average, 1 - N times and not once: `moments` has to know N.

    Args:
        chance_PG: the chances p of one draw.
    """
    nothing = float(nothing_kept(chance_PG))
    kept_PG = torch.zeros_like(chance_PG, dtype=torch.bool)
    while nothing < 1 and not kept_PG.any():
        kept_PG = systematic(chance_PG, torch.rand(len(chance_PG), 1, dtype=torch.float64, device=chance_PG.device))
    return torch.where(kept_PG, (1 - nothing) / chance_PG.clamp(min=1e-9), 0)


def added_variance(chance_PG: Tensor, coef_PG: Tensor, gram_SS: Tensor, nothing: float | None = None) -> float:
    """The variance that `draw_outputs` adds to the gradient g = sum_j a_j s_j, exactly.

    A single draw's gradient is off by d = sum_j (n_j - 1) a_j s_j, where n_j is 1 / p_j or 0. Prompts draw
    independently and the mean of d is 0, so that E ||d||^2 is a sum over prompts, over the few draws that u can lead
    to. Given that something is kept, which has the chance 1 - N, that becomes (1 - N) E ||d||^2 - N ||g||^2.

    Args:
        chance_PG: the chances p of one draw.
        coef_PG: the coefficients a_j; 0 where p_j is 0.
        gram_SS: the inner products <s_j, s_k> of all scores, S = P G, outputs of a prompt together, or unbiased
            estimates of them.
        nothing: the chance N, where these are some prompts of a batch; that of these if None.
    """
    P, G = chance_PG.shape
    chance_PG, coef_PG, gram_SS = chance_PG.double(), coef_PG.double(), gram_SS.double()
    gram_PGG = gram_SS.view(P, G, P, G)[range(P), :, range(P)]
    edges_PN = torch.cat([-chance_PG.cumsum(1) % 1, torch.zeros_like(chance_PG[:, :1])], 1).sort(1).values
    edges_PN = torch.cat([edges_PN, torch.ones_like(edges_PN[:, :1])], 1)  # between two of them u leads to one draw
    total = 0.0
    for low_P, high_P in itertools.pairwise(edges_PN.T):
        kept_PG = systematic(chance_PG, (low_P + high_P)[:, None] / 2)
        off_PG = (kept_PG / chance_PG.clamp(min=1e-9) - 1) * coef_PG
        total += float((high_P - low_P) @ torch.einsum("pj,pjk,pk->p", off_PG, gram_PGG, off_PG))
    nothing = float(nothing_kept(chance_PG)) if nothing is None else nothing
    whole = float(coef_PG.flatten() @ gram_SS @ coef_PG.flatten())
    return (1 - nothing) * total - nothing * whole


def _checked(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not coef_PG.shape == norm2_PG.shape == cost_PG.shape:
        raise ValueError(f"shapes differ: {tuple(coef_PG.shape)}, {tuple(norm2_PG.shape)}, {tuple(cost_PG.shape)}.")
    coef_PG, norm2_PG, cost_PG = (values_PG.detach().double() for values_PG in (coef_PG, norm2_PG, cost_PG))
    if not coef_PG.isfinite().all() or not norm2_PG.isfinite().all() or (norm2_PG < 0).any() or (cost_PG <= 0).any():
        raise ValueError("coefficients must be finite, squared norms at least 0, and costs positive.")
    return coef_PG, norm2_PG, cost_PG


def _at(kappa: float, coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor) -> Chances:
    pulls_PG, pull_PG = coef_PG != 0, coef_PG.abs() * (norm2_PG / cost_PG).sqrt()
    chance_PG = torch.where(pulls_PG, (pull_PG * kappa).clamp(LEAST_CHANCE, 1), 0)
    nothing = float(nothing_kept(chance_PG)) if pulls_PG.any() else 0.0
    final_PG = chance_PG / (1 - nothing)
    square_PG = coef_PG.square() * norm2_PG
    added_PG = torch.where(pulls_PG, (1 / final_PG.clamp(min=LEAST_CHANCE) - 1) * square_PG, 0)
    whole = float(square_PG.sum())
    added = float(added_PG.sum()) / whole if whole else 0.0
    return Chances(chance_PG, nothing, added, float((final_PG * cost_PG).sum() / cost_PG.sum()))


def _range(coef_PG: Tensor, norm2_PG: Tensor, cost_PG: Tensor) -> tuple[float, float]:
    """Logarithms of the kappa below which every p is the least, and of that from which on all are 1."""
    pull_N = (coef_PG.abs() * (norm2_PG / cost_PG).sqrt()).flatten()
    pull_N = pull_N[pull_N > 0]
    if not len(pull_N):
        return 0.0, 0.0
    return math.log(LEAST_CHANCE / float(pull_N.max())), -math.log(float(pull_N.min()))
