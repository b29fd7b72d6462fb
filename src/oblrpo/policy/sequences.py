"""Prompts and completions as one rectangle of tokens."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """S rows of T tokens, and which of them the policy drew itself.

    A row is padding, a prompt, and a completion followed by padding. In a completion the policy's own tokens may
    alternate with words of another source, such as a tool: the policy reads those, but they have no log-probability.

    Args:
        ids_ST: the tokens.
        mask_ST: 1 for tokens that are real, 0 for padding.
        own_ST: 1 for the policy's own tokens, the end-of-sequence token included where it was produced.
        start: the column in which completions begin.
    """

    ids_ST: Tensor
    mask_ST: Tensor
    own_ST: Tensor
    start: int

    @classmethod
    def of(
        cls, prompt_SQ: Tensor, prompt_mask_SQ: Tensor, completion_SC: Tensor, completion_mask_SC: Tensor
    ) -> Sequences:
        """Rows of a prompt padded on the left and a completion padded on the right that is all the policy's own."""
        return cls(
            torch.cat([prompt_SQ, completion_SC], 1),
            torch.cat([prompt_mask_SQ, completion_mask_SC], 1),
            torch.cat([torch.zeros_like(prompt_mask_SQ), completion_mask_SC], 1),
            prompt_SQ.shape[1],
        )

    @classmethod
    def join(cls, blocks: list[Sequences]) -> Sequences:
        """The rows of several blocks, with the padding that the longest prompt and completion ask for."""
        start = max(block.start for block in blocks)
        width = max(block.ids_ST.shape[1] - block.start for block in blocks)

        def joined(name: str) -> Tensor:
            padding = [(start - block.start, width - block.ids_ST.shape[1] + block.start) for block in blocks]
            values = [getattr(block, name) for block in blocks]
            return torch.cat([torch.nn.functional.pad(*both) for both in zip(values, padding, strict=True)])

        return cls(joined("ids_ST"), joined("mask_ST"), joined("own_ST"), start)

    @property
    def count(self) -> int:
        """S, the number of rows."""
        return len(self.ids_ST)

    @property
    def completion_SC(self) -> Tensor:
        """The columns of the completions."""
        return self.ids_ST[:, self.start :]

    @property
    def own_SC(self) -> Tensor:
        """Which tokens of the completions are the policy's own."""
        return self.own_ST[:, self.start :]

    @property
    def lengths_S(self) -> Tensor:
        """The number of the policy's own tokens in each row."""
        return self.own_ST.sum(1)

    @property
    def tokens(self) -> int:
        """The number of tokens of prompts and of the policy's own in all rows, as TRL counts them."""
        return int(self.mask_ST[:, : self.start].sum() + self.own_ST.sum())

    def by_token(self, blocks: Iterable[Tensor], values: Iterable[Tensor]) -> Tensor:
        """What blocks of rows say of their tokens, (S, C): 0 where none is the policy's own, NaN in other rows."""
        own_SC, parts = self.own_SC.bool(), list(zip(blocks, values, strict=True))
        dtype = parts[0][1].dtype if parts else torch.get_default_dtype()
        result_SC = torch.where(own_SC, math.nan, 0.0).to(dtype)
        for index_S, value_SC in parts:
            width = value_SC.shape[1]
            result_SC[index_S, :width] = torch.where(own_SC[index_S, :width], value_SC, 0.0)
        return result_SC

    def at(self, index: Tensor | slice) -> Sequences:
        """The rows that a slice, a mask or an index names, without the padding that only other rows needed."""
        mask_ST = self.mask_ST[index]
        real_T = mask_ST.bool().any(0)
        skip = int((~real_T[: self.start]).sum())
        part = slice(skip, self.start + max(1, int(real_T[self.start :].sum())))
        return Sequences(self.ids_ST[index][:, part], mask_ST[:, part], self.own_ST[index][:, part], self.start - skip)

    def flush_left(self) -> tuple[Tensor, Tensor]:
        """Rows that begin with their first real token, (S, T'), and the column of every completion's first token, (S,).

        All other padding is behind them, up to the longest row.
        """
        begin_S = self.start - self.mask_ST[:, : self.start].sum(1)
        width = int((self.mask_ST.sum(1)).max())
        column_ST = (begin_S[:, None] + torch.arange(width, device=begin_S.device)).clamp(max=self.ids_ST.shape[1] - 1)
        return self.ids_ST.gather(1, column_ST), self.start - begin_S


def pad(rows: list[list[int]], token: int, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids as (ids, mask), each (S, longest), padded on one side."""
    width = max(1, *(len(row) for row in rows))
    ids = torch.full((len(rows), width), token, dtype=torch.long, device="cpu")
    mask = torch.zeros((len(rows), width), dtype=torch.long, device="cpu")
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, place] = torch.tensor(row, dtype=torch.long, device="cpu")
        mask[index, place] = 1
    return ids.to(device), mask.to(device)


def take_columns(values_STC: Tensor, column_SC: Tensor) -> Tensor:
    """The entries of each row at its own columns, (S, columns, C); a view where they are the same for all rows."""
    first = int(column_SC[0, 0])
    width = column_SC.shape[1]
    if bool((column_SC == first + torch.arange(width, device=column_SC.device)).all()):
        return values_STC[:, first : first + width]
    return values_STC.take_along_dim(column_SC[..., None], 1)


@dataclass(frozen=True)
class MicroBatches:
    """Whole groups at a time: so many prompts, so many tokens, or all.

    Args:
        prompts: most prompts of a micro-batch, with all their completions; 0: any number.
        tokens: most tokens of a micro-batch, padding included; 0: any number. Groups are then taken in the order of
            their longest rows, so that little is padded, in as few micro-batches as can be and these of like size; one
            that is too large by itself goes alone.
    """

    prompts: int = 0
    tokens: int = 0

    def of(self, sequences: Sequences, group_size: int) -> list[Tensor]:
        """The indices of every micro-batch's groups; the rows of `sequences` lie one group after the other."""
        longest_P = sequences.mask_ST.sum(1).view(-1, group_size).amax(1)
        longest = longest_P.tolist()
        order = longest_P.argsort(descending=True, stable=True).tolist() if self.tokens else range(len(longest))

        def cut(tokens: int) -> list[list[int]]:
            blocks: list[list[int]] = []
            width = rows = 0
            for group in order:
                rows += group_size
                full = (tokens and rows * width > tokens) or (self.prompts and rows > self.prompts * group_size)
                if full or not blocks:
                    width, rows = longest[group], group_size
                    blocks.append([])
                blocks[-1].append(group)
            return blocks

        blocks = cut(self.tokens)
        if len(blocks) > 1 and self.tokens:  # the least bound that takes no more of them; the last would be left small
            least = bisect_left(range(1, self.tokens), -len(blocks), key=lambda tokens: -len(cut(tokens)))
            blocks = cut(1 + least)
        return [torch.tensor(block, device=longest_P.device) for block in blocks]


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
