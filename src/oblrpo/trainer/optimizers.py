"""The optimizer of a run by name, from torch or from packages that need no learning rate or no decay of one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from oblrpo.errors import InputError
from oblrpo.settings import OptimConfig

PACKAGES = {
    "Prodigy": "prodigyopt",
    "AdamWScheduleFree": "schedulefree",
    "RAdamScheduleFree": "schedulefree",
    "SGDScheduleFree": "schedulefree",
}
"""Optimizers beside torch's, and the package of each; the extra `optimizers` has them."""


def make_optimizer(config: OptimConfig, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """Return the named optimizer of torch.optim, or of one of `PACKAGES`, on these parameters."""
    kind = _class_of(config.optimizer)
    if refused := {"maximize", "differentiable", "capturable"} & set(config.optimizer_args):
        raise InputError(f"optimizer_args must not set {', '.join(sorted(refused))}: the update descends the loss -J.")
    settings = {"lr": config.learning_rate, **config.optimizer_args}
    if "weight_decay" in inspect.signature(kind).parameters:
        settings = {"weight_decay": 0.0} | settings  # not torch's default: weights shrink only if somebody says so
    try:
        return training(kind(parameters, **settings))
    except (TypeError, ValueError) as error:
        raise InputError(f"{config.optimizer} refuses its settings: {error}.") from None


def _class_of(name: str) -> type[Optimizer]:
    if name in {"LBFGS", "SparseAdam"}:
        raise InputError(f"{name} needs a closure or sparse gradients, which there are none; try AdamW.")
    if name in PACKAGES:
        try:
            return getattr(importlib.import_module(PACKAGES[name]), name)  # type: ignore[no-any-return]
        except ImportError:
            raise InputError(f"{name} needs {PACKAGES[name]}: pip install 'oblrpo[optimizers]'.") from None
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise InputError(
            f"there is no optimizer {name!r} in torch.optim, nor among {', '.join(PACKAGES)}; try AdamW or SGD."
        )
    return kind


def training(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer ready for a step; schedule-free ones have to be told."""
    if back := getattr(optimizer, "train", None):
        back()
    return optimizer


def hand_out(optimizer: Optimizer) -> None:
    """Leave the weights that a schedule-free optimizer hands out in the place of those that it trains: a run's end."""
    if turn := getattr(optimizer, "eval", None):
        turn()


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[bool]:
    """Put the weights that a schedule-free optimizer hands out in place of those that it trains, for a while.

    It trains at y, between its last iterate and the average x of all, and x is the result: what is evaluated and saved.
    Other optimizers hand out what they train; the context is then empty, and yields False.
    """
    if not hasattr(optimizer, "eval"):
        yield False
        return
    hand_out(optimizer)
    try:
        yield True
    finally:
        training(optimizer)
