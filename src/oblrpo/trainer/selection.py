"""Which outputs of a batch go through the model a second time, for the gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import InputError
from oblrpo.estimators import Chances
from oblrpo.settings import AlgorithmConfig, lost
from oblrpo.trainer.baseline import StepBaseline
from oblrpo.trainer.batch import Batch, Draw

NAMES = ("all", "exact", "compute-optimal")
"""What the setting `train_on` may be."""
BACKWARD = 3.0
"""What training on a token costs, in forwards of a token."""
SAMPLING = 1.0
"""What sampling a token costs, in the same unit."""


@dataclass(frozen=True)
class Selection:
    """Chooses outputs by the setting `train_on`, and says how many times each of them counts.

    - `all`: every output.
    - `exact`: those whose coefficients are not 0 anyway, where rewards and lengths tell.
    - `compute-optimal`: with those for which variance times work is least.
    """

    rule: str
    several_updates: bool

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Selection:
        """The selection of a config.

        Raises:
            InputError: `train_on` is none of the above.
        """
        if config.train_on not in NAMES:
            was = lost("train_on", config.train_on)
            raise InputError(f"train_on must be all, exact or compute-optimal, not {config.train_on!r}.{was}")
        return cls(config.train_on, config.num_iterations > 1)

    @property
    def draws(self) -> bool:
        """Whether outputs are drawn, and count in proportion."""
        return self.rule == "compute-optimal"

    def choose(self, batch: Batch, baseline: StepBaseline, step: int) -> Batch:
        """The batch with `keep_PG`, the number of times each output counts, unless it has been chosen already.

        Raises:
            InputError: the sampler does not tell what a choice needs.
        """
        fixed_PG = baseline.fix(batch) if self.draws else None
        if batch.keep_PG is not None:
            return batch
        keep_PG = torch.ones_like(batch.rewards_PG)
        if fixed_PG is not None:
            return self._drawn(batch, fixed_PG, baseline.proxy(batch))
        if self.rule == "exact" and not self.several_updates and batch.sampler_logps_SC is None:
            keep_PG = baseline.pulling(batch, step).to(keep_PG)
        return replace(batch, keep_PG=_at_least_one(keep_PG, batch.valid_PG))

    def _drawn(self, batch: Batch, baseline_PG: Tensor, norm2_PG: Tensor) -> Batch:
        coef_PG = (batch.rewards_PG - baseline_PG) * batch.share_of_mean()
        coef_PG = torch.where(coef_PG.abs() > 1e-6 * coef_PG.abs().max(), coef_PG, 0)
        found = self._chances(coef_PG, norm2_PG, batch)
        keep_PG = estimators.draw_outputs(found.chance_PG).to(batch.rewards_PG)
        draw = Draw(found.chance_PG, found.nothing, coef_PG, found.added)
        return replace(batch, keep_PG=_at_least_one(keep_PG, batch.valid_PG), draw=draw)

    def _chances(self, coef_PG: Tensor, norm2_PG: Tensor, batch: Batch) -> Chances:
        cost_PG = batch.sequences.mask_ST.sum(1).view(batch.shape).to(coef_PG) * BACKWARD
        prompts = batch.sequences.prompt_mask_SQ.sum() / batch.shape[1]  # read once for their group
        sampled = float(prompts + batch.sequences.own_ST.sum()) * SAMPLING
        return estimators.chances_of_least_work(coef_PG, norm2_PG, cost_PG, sampled)


def _at_least_one(keep_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """The same, with one output where none pulls, so that there is a gradient, of 0."""
    if not keep_PG.any():
        keep_PG[tuple(valid_PG.nonzero()[0])] = 1
    return keep_PG
