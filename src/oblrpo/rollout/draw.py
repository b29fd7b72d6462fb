"""Draws of the next token from softmax(logits / temperature)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

WIDTH = 256  # entries of the vocabulary that are summed at once


class Drawn(NamedTuple):
    """One token a row."""

    next_token_S: Tensor  # the token; -1 where the logits give no probabilities
    logp_S: Tensor  # its log-probability, in nats
    entropy_S: Tensor | None = None  # the entropy of the distribution that it was drawn from, in nats


@dataclass(frozen=True)
class Draw:
    """How the next token is chosen."""

    temperature: float  # temperature of the distribution; 0 takes the most probable token
    top_p: float = 1.0  # share of the distribution that is drawn from
    entropy: bool = False
    """Whether to take the entropy, at two more passes over the vocabulary; not at temperature 0."""

    def __call__(self, logits_SV: Tensor) -> Drawn:
        """Return a token a row."""
        scores_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
        if not self.temperature:
            return Drawn(scores_SV.argmax(-1), scores_SV.new_zeros(len(scores_SV)))
        if self.temperature != 1:
            scores_SV = scores_SV / self.temperature
        if self.top_p < 1:
            warp: Any = TopPLogitsWarper(self.top_p)
            scores_SV = warp(None, scores_SV)
        probabilities_SV = scores_SV.softmax(-1)
        next_token_S = choose(probabilities_SV)
        drawn_S1 = next_token_S.clamp(min=0)[:, None]
        logp_S1 = probabilities_SV.gather(1, drawn_S1).log()
        if not self.entropy:
            return Drawn(next_token_S, logp_S1[:, 0])
        # H = log Z - E[score], without a logarithm an entry; scores of -inf are never drawn and count 0.
        normaliser_S1 = scores_SV.gather(1, drawn_S1) - logp_S1
        finite_SV = scores_SV.clamp(min=torch.finfo(scores_SV.dtype).min)
        entropy_S = normaliser_S1[:, 0] - torch.linalg.vecdot(probabilities_SV, finite_SV)
        return Drawn(next_token_S, logp_S1[:, 0], entropy_S)


def choose(probabilities_SV: Tensor) -> Tensor:
    """Draw one entry a row in proportion to its value, by torch's global random state; -1 where a row is not finite.

    A block of entries is drawn by the blocks' sums, then an entry of that block: two uniform numbers a row in place of
    `torch.multinomial`'s one exponential number an entry, which takes longer than the softmax by far.
    """
    count, entries = probabilities_SV.shape
    full = entries - entries % WIDTH  # entries of full blocks
    sums_SK = torch.cat(
        [
            probabilities_SV[:, :full].unflatten(1, (full // WIDTH, WIDTH)).sum(-1),
            probabilities_SV[:, full:].sum(-1, keepdim=True),
        ],
        1,
    ).double()
    uniform_2S1 = torch.rand(2, count, 1, dtype=torch.float64, device=probabilities_SV.device)
    block_S1 = _place(sums_SK, uniform_2S1[0])
    index_SR = block_S1 * WIDTH + torch.arange(WIDTH, device=block_S1.device)
    inside_SR = probabilities_SV.gather(1, index_SR.clamp(max=entries - 1)).double() * (index_SR < entries)
    next_token_S = index_SR.gather(1, _place(inside_SR, uniform_2S1[1]))[:, 0].clamp(max=entries - 1)
    return next_token_S.where(sums_SK.sum(-1).isfinite(), -1)


def _place(weights_SN: Tensor, uniform_S1: Tensor) -> Tensor:
    """Return the first entry up to which the weights add up to more than this share of their sum, (S, 1)."""
    cumulative_SN = weights_SN.cumsum(1)
    place_S1 = torch.searchsorted(cumulative_SN, uniform_S1 * cumulative_SN[:, -1:], right=True)
    return place_S1.clamp(max=weights_SN.shape[1] - 1)
