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
        prompts: most prompts of a micro-batch; 0: any number.
        tokens: most tokens of a micro-batch, padding included; 0: any number. Groups are then taken in the order of
            their longest rows, so that little is padded; one that is too large by itself goes alone.
    """

    prompts: int = 0
    tokens: int = 0

    @property
    def any(self) -> bool:
        """Whether there may be several."""
        return bool(self.prompts or self.tokens)

    def of(self, sequences: Sequences, group_size: int) -> list[Tensor]:
        """The indices of each micro-batch's groups; row p G + j of the sequences is output j of group p."""
        longest_P = sequences.mask_ST.sum(1).view(-1, group_size).amax(1)
        if not self.tokens:
            return list(torch.arange(len(longest_P), device=longest_P.device).split(self.prompts or len(longest_P)))
        order_P = longest_P.argsort(descending=True, stable=True)
        result, start = [], 0
        while start < len(order_P):
            longest = int(longest_P[order_P[start]])
            room = max(1, self.tokens // (longest * group_size))
            result.append(order_P[start : start + min(room, self.prompts or room)])
            start += len(result[-1])
        return result


def rows_of(index_P: Tensor, group_size: int) -> Tensor:
    """The rows of these groups' outputs, (S,)."""
    return (index_P[:, None] * group_size + torch.arange(group_size, device=index_P.device)).flatten()
