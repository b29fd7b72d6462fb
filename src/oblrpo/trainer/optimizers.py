"""The optimizer of a run by name, including learning-rate-free and schedule-free optimizers; its scheduler."""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from oblrpo.errors import InputError, pip_install
from oblrpo.settings import OptimConfig

PACKAGES = {
    "Prodigy": "prodigyopt",
    "AdamWScheduleFree": "schedulefree",
    "RAdamScheduleFree": "schedulefree",
    "SGDScheduleFree": "schedulefree",
}
"""Optimizers beside torch's, and the package of each; the extra `optimizers` has them."""


def make_optimizer(config: OptimConfig, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """Return the named optimizer of torch.optim, or of one of `PACKAGES`, on these parameters.

    It clips the gradient itself, so that whatever looks at `.grad` before the update sees all of it.
    """
    name, kind = config.optimizer, getattr(torch.optim, config.optimizer, None)
    if name in {"LBFGS", "SparseAdam"}:
        raise InputError(f"{name} needs a closure or sparse gradients, which a run does not have; try AdamW.")
    if name in PACKAGES:
        try:
            kind = getattr(importlib.import_module(PACKAGES[name]), name)
        except ImportError:
            raise InputError(f"{name} needs {PACKAGES[name]}; install it with: {pip_install('optimizers')}") from None
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise InputError(
            f"there is no optimizer {name!r} in torch.optim, nor among {', '.join(PACKAGES)}; try AdamW or SGD."
        )
    if refused := {"maximize", "differentiable", "capturable"} & set(config.optimizer_args):
        raise InputError(f"optimizer_args must not set {', '.join(sorted(refused))}: the update descends the loss -J.")
    settings = {"lr": config.learning_rate, **config.optimizer_args}
    if "weight_decay" in inspect.signature(kind).parameters:
        settings = {"weight_decay": 0.0} | settings  # not torch's default: weights decay only where it is set
    try:
        optimizer = training(kind(parameters, **settings))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} rejects its settings: {error}.") from None
    if config.max_grad_norm:

        def clip(*_: object) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)

        optimizer.register_step_pre_hook(clip)
    return optimizer


def make_scheduler(kind: str, optimizer: Optimizer, updates: int) -> LambdaLR | None:
    """Return what takes the learning rate through its course of that name, over so many updates; None: constant."""
    if kind == "constant":
        return None
    from transformers import get_scheduler

    scheduler: LambdaLR = get_scheduler(kind, optimizer, 0, updates)
    return scheduler


def training(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer ready for a step; schedule-free ones have a mode for it."""
    if back := getattr(optimizer, "train", None):
        back()
    return optimizer


def use_averaged_weights(optimizer: Optimizer) -> None:
    """End a run: a schedule-free optimizer puts its average, which is the result, in the place of what it trains."""
    if turn := getattr(optimizer, "eval", None):
        turn()


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[bool]:
    """Let the policy have the average weights of a schedule-free optimizer for a while, which it evaluates and saves.

    Other optimizers have no average: the context is then empty, and yields False.
    """
    if not hasattr(optimizer, "eval"):
        yield False
        return
    use_averaged_weights(optimizer)
    try:
        yield True
    finally:
        training(optimizer)
