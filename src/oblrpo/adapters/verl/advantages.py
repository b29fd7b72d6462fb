"""The advantage estimators that verl finds by name, and the way by which score norms reach them.

An estimator is handed rewards, mask and uids only. What it does with them waits in a context variable that
`trainer.OBLRTrainer` sets around verl's own computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from oblrpo.adapters.verl.settings import ESTIMATORS
from oblrpo.errors import InputError

_ADVANTAGES: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("oblrpo_advantages", default=None)


@contextmanager
def taken_from(advantages: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the estimators take advantages from this function of the rewards, (B,) both, while the context lasts."""
    token = _ADVANTAGES.set(advantages)
    try:
        yield
    finally:
        _ADVANTAGES.reset(token)


def _estimator(token_level_rewards: Tensor, response_mask: Tensor, **unused: Any) -> tuple[Tensor, Tensor]:
    """The advantage F - b of every output on each of its tokens, once as advantages and once as returns."""
    if (of := _ADVANTAGES.get()) is None:
        names = " and ".join(ESTIMATORS)
        raise InputError(
            f"{names} need score norms, which verl's own trainer does not take; set "
            "trainer.v1.trainer_mode=oblr_po (and trainer.use_v1=True)."
        )
    advantages = of(token_level_rewards.double().sum(1)).to(token_level_rewards)[:, None] * response_mask
    return advantages, advantages


for _name in ESTIMATORS:
    register_adv_est(_name)(_estimator)
