"""What one gradient is taken of: completions, rewards, which of them count, and who sampled them."""

from __future__ import annotations

import torch
from torch import Tensor

from oblrpo.policy import Sequences


class Batch:
    """P prompts with G outputs each, of which some may not count.

    g = (1/P') sum_i g_i over the P' prompts that take part, g_i = (1/G_i) sum_j over the G_i outputs of prompt i that
    count. A prompt with fewer of them than `smallest_group` takes no part: none of its outputs counts then.

    Args:
        sequences: row p G + j is output j of prompt p.
        rewards_PG: F; what stands in the place of an output that does not count is ignored, NaN too.
        valid_PG: which outputs have a reward; all if None.
        smallest_group: the fewest such outputs that a prompt takes part with.
        sampler_logps_SC: log-probability of each token under the sampler, where rho corrects for its difference.

    Raises:
        ValueError: valid_PG has another shape than the rewards.
    """

    def __init__(
        self,
        sequences: Sequences,
        rewards_PG: Tensor,
        valid_PG: Tensor | None = None,
        smallest_group: int = 1,
        sampler_logps_SC: Tensor | None = None,
    ) -> None:
        self.sequences, self.sampler_logps_SC = sequences, sampler_logps_SC
        if valid_PG is not None and valid_PG.shape != rewards_PG.shape:
            raise ValueError(f"valid_PG has shape {tuple(valid_PG.shape)}, rewards_PG {tuple(rewards_PG.shape)}.")
        counted_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if valid_PG is None else valid_PG.bool()
        counted_PG = counted_PG & (counted_PG.sum(1, keepdim=True) >= smallest_group)
        self.counted_PG = counted_PG
        """Which outputs count."""
        self.valid_PG = None if bool(counted_PG.all()) else counted_PG
        """The same for `estimators`; None: all."""
        self.rewards_PG = torch.where(counted_PG, rewards_PG, 0)
        """F; 0 where an output does not count."""
        self.part_P = counted_PG.any(1)
        """Which prompts take part."""
        self.prompts = int(self.part_P.sum())
        """P'."""

    @property
    def shape(self) -> tuple[int, int]:
        """P and G, masked outputs and their prompts included."""
        P, G = self.rewards_PG.shape
        return P, G

    def valid(self, prompts: slice) -> Tensor | None:
        """Which outputs of these prompts count; None: all."""
        return None if self.valid_PG is None else self.valid_PG[prompts]

    def of_mean(self, coef_PG: Tensor, prompts: slice) -> Tensor:
        """c_ij / (P' G_i) for these prompts, 0 where an output does not count: what it is of the mean over prompts."""
        if self.valid_PG is None:
            return coef_PG / self.prompts / self.shape[1]
        counted_PG = self.valid_PG[prompts]
        outputs_P1 = counted_PG.sum(1, keepdim=True).clamp(min=1)
        return torch.where(counted_PG, coef_PG / max(self.prompts, 1) / outputs_P1, 0)
