"""Which outputs of a batch go through the model a second time, for the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.step.batch import Batch

SELECTIONS = ("all", "exact", "compute-optimal")
"""What the setting `train_on` may be: every output; those whose coefficients are not 0, where rewards and lengths tell;
a draw for which variance times work is least."""
ROUNDING = 1e-6
"""An advantage below this share of the largest reward is what float32 leaves of 0."""
BACKWARD = 3.0
"""What training on a token costs, in forwards of a token."""
SAMPLING = 1.0
"""What sampling a token costs, in the same unit."""


@dataclass(frozen=True)
class Draw:
    """The draw of the outputs that go through the model, for the metrics of its cost."""

    chance_PG: Tensor
    """The chances that outputs were kept with in one draw."""
    nothing: float
    """The chance that one draw keeps nothing, and is made again."""
    coef_PG: Tensor
    """What would have multiplied each score in the gradient if all had been kept, a_j."""
    added: float
    """The variance that leaving out adds, with proxies for w_j, over sum_j a_j^2 w_j."""


def without_idle(batch: Batch, baseline_PG: Tensor) -> Tensor:
    """How many times each output counts where those with an advantage of 0 are left out, (P, G): 0 or 1."""
    advantages_PG = torch.where(batch.valid_PG, batch.rewards_PG - baseline_PG, 0)
    pulls_PG = advantages_PG.abs() > ROUNDING * batch.rewards_PG.abs().max()
    return _at_least_one(pulls_PG.to(batch.keep_PG), batch.valid_PG)


def draw_least_work(batch: Batch, baseline_PG: Tensor) -> tuple[Tensor, Draw]:
    """Draw outputs so that variance times work is least; how many times each output counts, (P, G), and the draw.

    The batch has its `proxy_PG`, and the baseline knows nothing of the draw.
    """
    assert batch.proxy_PG is not None
    coef_PG = (batch.rewards_PG - baseline_PG) * batch.share_of_mean
    coef_PG = torch.where(coef_PG.abs() > ROUNDING * coef_PG.abs().max(), coef_PG, 0)
    cost_PG = batch.sequences.mask_ST.sum(1).view(batch.shape).to(coef_PG) * BACKWARD
    prompts = batch.sequences.prompt_mask_SQ.sum() / batch.shape[1]  # read once for their group
    sampled = float(prompts + batch.sequences.own_ST.sum()) * SAMPLING
    chances = estimators.chances_of_least_work(coef_PG, batch.proxy_PG, cost_PG, sampled)
    keep_PG = estimators.draw_outputs(chances.chance_PG).to(batch.rewards_PG)
    draw = Draw(chances.chance_PG, chances.nothing, coef_PG, chances.added)
    return _at_least_one(keep_PG, batch.valid_PG), draw


def _at_least_one(keep_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """The same, with one output where none pulls, so that there is a gradient, of 0."""
    if not keep_PG.any():
        keep_PG[tuple(valid_PG.nonzero()[0])] = 1
    return keep_PG
