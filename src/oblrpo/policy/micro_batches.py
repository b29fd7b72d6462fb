"""Micro-batches: which prompts' completions go through the model together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.policy.sequences import Sequences


@dataclass(frozen=True)
class MicroBatches:
    """Whole groups at a time: so many prompts, so many tokens, or all.

    Args:
        prompts: most prompts of a micro-batch, with all their completions; 0: any number.
        tokens: most tokens of a micro-batch, padding included; 0: any number. Groups are then taken in the order of
            their longest rows, so that little is padded; one that is too large by itself goes alone.
    """

    prompts: int = 0
    tokens: int = 0

    @property
    def any(self) -> bool:
        """Whether there may be several."""
        return bool(self.prompts or self.tokens)

    def of(self, sequences: Sequences, group_size: int, count_P: Tensor | None = None) -> list[Tensor]:
        """The indices of every micro-batch's groups; the rows of `sequences` lie one group after the other.

        count_P are the rows that are left of every group, at least one; all if None. Groups with fewer rows than
        `group_size` leave room for more groups.
        """
        lengths_S = sequences.mask_ST.sum(1)
        device = lengths_S.device
        if count_P is None:
            count_P = torch.full((len(lengths_S) // group_size,), group_size, device=device)
        owner_S = torch.arange(len(count_P), device=device).repeat_interleave(count_P)
        longest_P = lengths_S.new_zeros(len(count_P)).scatter_reduce(0, owner_S, lengths_S, "amax")
        counts, longest = count_P.tolist(), longest_P.tolist()
        order = longest_P.argsort(descending=True, stable=True).tolist() if self.tokens else range(len(counts))
        blocks: list[list[int]] = []
        width = rows = 0
        for group in order:
            rows += counts[group]
            full = (self.tokens and rows * width > self.tokens) or (self.prompts and rows > self.prompts * group_size)
            if full or not blocks:
                width, rows = longest[group], counts[group]
                blocks.append([])
            blocks[-1].append(group)
        return [torch.tensor(block, device=device) for block in blocks]


def of_like_length(lengths_S: Tensor, extra: int) -> list[Tensor]:
    """The rows in slices of like length that cost least, each with its rows ascending; the longest rows come first.

    A slice costs its tokens, padding included, and as much as `extra` tokens for being a forward of its own.
    """
    length_K, count_K = lengths_S.unique(return_counts=True)
    lengths, ends = length_K.tolist(), [0, *count_K.cumsum(0).tolist()]
    least, begins = [0], [0]  # the cost of all rows up to each length, and the first length of their last slice
    for last, length in enumerate(lengths):
        costs = [least[first] + (ends[last + 1] - ends[first]) * length + extra for first in range(last + 1)]
        begins.append(min(range(last + 1), key=costs.__getitem__))
        least.append(costs[begins[-1]])
    slices, end = [], len(lengths)
    while end:
        inside_S = (lengths_S >= lengths[begins[end]]) & (lengths_S <= lengths[end - 1])
        slices.append(inside_S.nonzero().flatten())
        end = begins[end]
    return slices


def rows_of(index_P: Tensor, group_size: int) -> Tensor:
    """The rows of these groups' outputs, (S,)."""
    return (index_P[:, None] * group_size + torch.arange(group_size, device=index_P.device)).flatten()
