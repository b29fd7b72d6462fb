"""Prompts and completions as one rectangle of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """S rows of left-padded prompt and right-padded completion.

    Args:
        prompt_SQ: prompt tokens.
        prompt_mask_SQ: which of them are real.
        completion_SC: completion tokens, the end-of-sequence token included where it was produced.
        completion_mask_SC: which of them are real.
    """

    prompt_SQ: Tensor
    prompt_mask_SQ: Tensor
    completion_SC: Tensor
    completion_mask_SC: Tensor

    @property
    def lengths_S(self) -> Tensor:
        """Tokens of each completion."""
        return self.completion_mask_SC.sum(1)

    @property
    def tokens(self) -> int:
        """Real tokens, prompts and completions."""
        return int(self.prompt_mask_SQ.sum() + self.completion_mask_SC.sum())

    def at(self, index: Tensor) -> Sequences:
        """The rows that a mask or an index names, with their padding."""
        return Sequences(*(each[index] for each in vars(self).values()))

    def rows(self, start: int, stop: int) -> Sequences:
        """Rows [start, stop) without the padding that only other rows needed."""
        prompt_mask, completion_mask = self.prompt_mask_SQ[start:stop], self.completion_mask_SC[start:stop]
        skip = int((~prompt_mask.bool().any(0)).sum())
        keep = max(1, int(completion_mask.bool().any(0).sum()))
        return Sequences(
            self.prompt_SQ[start:stop, skip:],
            prompt_mask[:, skip:],
            self.completion_SC[start:stop, :keep],
            completion_mask[:, :keep],
        )


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
