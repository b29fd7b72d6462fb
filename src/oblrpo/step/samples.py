"""Sampled outputs with their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.policy.micro_batches import rows_of
from oblrpo.rollout import Rollouts, join


@dataclass(frozen=True)
class Sampled:
    """Completions of P prompts, G of each, with their rewards."""

    rollouts: Rollouts
    rewards_PG: Tensor
    """The rewards F; the value of an output without a reward means nothing."""
    valid_PG: Tensor
    """Which outputs have a reward."""

    def at(self, index_P: Tensor) -> Sampled:
        """The completions of some of the prompts."""
        index_P = index_P.to(self.rewards_PG.device)
        rows_S = rows_of(index_P, self.rewards_PG.shape[1])
        return Sampled(self.rollouts.at(rows_S), self.rewards_PG[index_P], self.valid_PG[index_P])

    @classmethod
    def join(cls, blocks: Sequence[Sampled]) -> Sampled:
        """The completions of all the prompts of several blocks."""
        return cls(
            join([block.rollouts for block in blocks]),
            torch.cat([block.rewards_PG for block in blocks]),
            torch.cat([block.valid_PG for block in blocks]),
        )
