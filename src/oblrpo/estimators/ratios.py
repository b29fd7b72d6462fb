"""Ratios of probabilities, for several updates on one batch: what each multiplies the gradient of log pi by.

With l_t = log pi(o_t) - log pi_old(o_t) a token has the ratio r_t = exp(l_t), and a completion of n tokens rho =
exp(sum_t l_t) or its geometric mean per token, exp(sum_t l_t / n). Every published loss below has the gradient
sum_t m_t A grad log pi(o_t) with weights m_t that are constants; clipping puts m_t = 0 where a token has already moved
far enough in the direction that A asks for. On-policy all of them are exactly 1. Only `sequence` is unbiased: clipped
and truncated weights do not have E[sum_t m_t grad log pi(o_t)] = 0, so that a baseline b adds -b times it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.tables.algorithms import RATIOS, Bounds, Ratio


@dataclass(frozen=True)
class Weights:
    """The weights m of the gradient of log pi, and where they are not the plain ratio."""

    weight: Tensor  # the weights, of every token (S, C) or of every completion (S, 1)
    clipped: Tensor  # where a bound took effect, of the same shape


def ratio_weights(
    ratio: Ratio, token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S: Tensor
) -> Weights:
    """The weights of completions under the policy that gives the log-probabilities token_logps_SC.

    `ratio` is a row of `RATIOS`, or one with other bounds; old_SC are the log-probabilities of the policy before the
    first update. What stands outside own_SC, the tokens that count, is ignored, NaN too. advantages_S are those of the
    first update, as the sources have it; a ratio that looks at them takes their sign.
    """
    own_SC = own_SC.bool()
    token_logps_SC, old_SC = (torch.where(own_SC, logps.detach(), 0) for logps in (token_logps_SC, old_SC))
    return FUNCTIONS[ratio.function](token_logps_SC, old_SC, own_SC, advantages_S.detach()[:, None], ratio.bounds)


def sequence(token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    """The importance weight of the whole completion, rho = pi(o|q) / pi_old(o|q)."""
    return _unclipped((token_logps_SC - old_SC).sum(1, keepdim=True).exp())


def none(token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    """The weight 1: later updates take the completions for their own policy's."""
    return _unclipped(torch.ones_like(token_logps_SC[:, :1]))


def ppo(token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    """The weight r_t, but 0 where A > 0 and r_t > 1 + high, or A < 0 and r_t < 1 - low.

    The gradient of min(r_t A, clip(r_t, 1 - low, 1 + high) A). Schulman et al. 2017 (PPO), arXiv 1707.06347; Shao et
    al. 2024 (GRPO), arXiv 2402.03300.
    """
    return _clipped((token_logps_SC - old_SC).exp(), advantages_S1, bounds)


def gspo(token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    """As `ppo` with one ratio a completion, exp(sum_t l_t / n), the geometric mean of its tokens' ratios.

    Zheng et al. 2025 (GSPO), arXiv 2507.18071, whose loss has the loss weighting 1 / n, too.
    """
    lengths_S1 = own_SC.sum(1, keepdim=True).clamp(min=1)
    return _clipped(((token_logps_SC - old_SC).sum(1, keepdim=True) / lengths_S1).exp(), advantages_S1, bounds)


def cispo(token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    """The weight min(r_t, high): no token is left out.

    MiniMax 2025 (CISPO), arXiv 2506.13585, with the bound that Khatri et al. 2025 (ScaleRL), arXiv 2510.13786, take.
    """
    ratio_SC = (token_logps_SC - old_SC).exp()
    return Weights(ratio_SC.clamp(max=bounds.high), ratio_SC > bounds.high)


def dppo(token_logps_SC: Tensor, old_SC: Tensor, own_SC: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    """The weight r_t, but 0 where A > 0 and pi - pi_old > high, or A < 0 and pi_old - pi > low, of the token.

    Qi et al. 2026 (DPPO, with the total variation of taking the token or not), arXiv 2602.04879; without the truncation
    of r_t that they add where the sampler is another program (`sampler_correction` does that here).
    """
    moved_SC = token_logps_SC.exp() - old_SC.exp()
    outside_SC = ((advantages_S1 > 0) & (moved_SC > bounds.high)) | ((advantages_S1 < 0) & (moved_SC < -bounds.low))
    return Weights((token_logps_SC - old_SC).exp().masked_fill(outside_SC, 0), outside_SC)


def _unclipped(ratio: Tensor) -> Weights:
    return Weights(ratio, torch.zeros_like(ratio, dtype=torch.bool))


def _clipped(ratio: Tensor, advantages_S1: Tensor, bounds: Bounds) -> Weights:
    outside = ((advantages_S1 > 0) & (ratio > 1 + bounds.high)) | ((advantages_S1 < 0) & (ratio < 1 - bounds.low))
    return Weights(ratio.masked_fill(outside, 0), outside)


FUNCTIONS: dict[str, Callable[..., Weights]] = {row.function: globals()[row.function] for row in RATIOS.values()}
"""The functions of `RATIOS`, of token_logps_SC, old_SC, own_SC, advantages_S1 and bounds, all taken for constants."""
