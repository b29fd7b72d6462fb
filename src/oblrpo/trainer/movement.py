"""How far an update moves the policy, measured on some of the batch's own outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oblrpo.policy import Policy, Sequences
from oblrpo.trainer.results import Gradient


class Movement:
    """Scores a subsample of a batch once more after the update.

    Args:
        policy: the policy that is updated.
        temperature: the temperature of sampling.
        every: how many of the batch's outputs one that is scored stands for.
        rows: how many outputs go through the model at a time; 0: all.
    """

    def __init__(self, policy: Policy, temperature: float, every: int, rows: int) -> None:
        self.policy, self.temperature, self.every, self.rows = policy, temperature, every, rows

    def watch(self, gradient: Gradient) -> Callable[[], Tensor]:
        """Return a function that tells, after the update, by how much log pi(o|q) has changed, (some S,)."""
        rows = gradient.batch.valid_PG.flatten().nonzero().flatten()[:: self.every]
        chosen = gradient.batch.sequences.at(rows)
        # In bfloat16 another batch is rounded in another way, which is not to be taken for a movement of the policy.
        before_S = self._logps_S(chosen) if self.policy.rounds else gradient.logps_PG.flatten()[rows]
        return lambda: self._logps_S(chosen) - before_S

    @torch.no_grad()
    def _logps_S(self, chosen: Sequences) -> Tensor:
        outputs = (self.policy.logps(block, self.temperature).logps_S for block in chosen.blocks(self.rows))
        return torch.cat(list(outputs))
