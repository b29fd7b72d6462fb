"""The advantage estimators that verl finds by name, and the way by which score norms reach them.

An estimator is handed rewards, mask and uids only; what else it needs waits in a context variable that
`trainer.OBLRTrainer` sets around verl's own computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from oblrpo import estimators
from oblrpo.adapters.shared import baseline_metrics
from oblrpo.adapters.verl.prompt_rows import PromptRows
from oblrpo.adapters.verl.settings import ESTIMATORS
from oblrpo.errors import InputError
from oblrpo.step import BaselinePass


@dataclass
class EstimatorInputs:
    """The adapter's knowledge of a batch, beside what verl hands to an estimator."""

    norm2_S: Tensor
    """Squared score norms, or the weights that stand for them, in the batch's order."""
    baseline: BaselinePass
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the baseline, which the estimator puts here."""


_INPUTS: ContextVar[EstimatorInputs | None] = ContextVar("oblrpo_inputs", default=None)


@contextmanager
def handed_over(inputs: EstimatorInputs) -> Iterator[None]:
    """Let the estimators see these inputs while the context lasts."""
    token = _INPUTS.set(inputs)
    try:
        yield
    finally:
        _INPUTS.reset(token)


def _advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    config: Any = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """The advantage F - b of every output on each of its tokens, once as advantages and once as returns."""
    inputs = _INPUTS.get()
    if inputs is None:
        names = " and ".join(ESTIMATORS)
        raise InputError(
            f"{names} need score norms, which verl's own trainer does not take; set "
            "trainer.v1.trainer_mode=oblr_po (and trainer.use_v1=True)."
        )
    groups = PromptRows([str(uid) for uid in index], response_mask.any(-1))
    rewards_PG = groups.take(token_level_rewards.double().sum(-1))
    norm2_PG = groups.take(inputs.norm2_S.double())
    valid_PG = groups.valid_PG
    baseline_PG = inputs.baseline.of(rewards_PG, valid_PG, groups.take(response_mask), norm2_PG)
    advantage_S = groups.put(estimators.advantages(rewards_PG, baseline_PG, valid_PG)).to(token_level_rewards)
    advantages = advantage_S[:, None] * response_mask
    metrics = baseline_metrics(rewards_PG, valid_PG, baseline_PG, norm2_PG)
    inputs.metrics |= {f"critic/{name}": value for name, value in metrics.items()}
    return advantages, advantages


for _name in ESTIMATORS:
    register_adv_est(_name)(_advantages)
