"""A brake on steps that overshoot: the slope of J that is left along the last update, as the next gradient sees it.

<u_t, g_{t+1}> is an unbiased estimate of the slope of J along the update u_t at its end, because the next batch's noise
is its own: above 0 the step could have been longer, below 0 it has gone beyond the best point along u_t. Where u_t is
the gradient and J has the curvature c, its expectation ||grad J||^2 - eta c (||grad J||^2 + tr H / N) is 0 at theorem
4's rate. A slope of one batch is noisy, so that the brake follows it slowly, and it only ever shortens steps. Between
updates on one batch the noise is not the next gradient's own: slopes are then too high, and the brake comes late.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

GAIN = 0.1
"""The change of the brake's logarithm in a step whose slope is as large as its root mean square."""
CLIP = 2.0
"""How many root mean squares a slope counts for at the most."""
MEMORY = 0.9
"""Decay of the slopes' mean square."""
STRONGEST = 1e-3
"""The least factor."""


def slope_left(optimizer: Optimizer) -> float | None:
    """The product of the last update's direction, from the optimizer's state, and the gradient that is there now.

    The direction is Adam's, average of gradients over root of the average square, for it and its kin, and the average
    for SGD with momentum; the scale is not the update's. Returns None before the first update, without gradients, and
    for optimizers that keep no average.
    """
    products = [
        (direction * p.grad).sum().double()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and (direction := _direction(optimizer, group, p)) is not None
    ]
    return float(torch.stack(products).sum()) if products else None


def _direction(optimizer: Optimizer, group: dict[str, Any], p: Tensor) -> Tensor | None:
    state: dict[str, Tensor] = optimizer.state.get(p, {})
    direction = None
    if "exp_avg" in state and "exp_avg_sq" in state:
        root = state.get("max_exp_avg_sq", state["exp_avg_sq"]).sqrt().add_(group["eps"])
        direction = torch.div(state["exp_avg"], root, out=root)
    elif isinstance(optimizer, SGD):
        direction = state.get("momentum_buffer")
    return -direction if direction is not None and group.get("maximize") else direction


class Brake:
    """A factor on the rate, at most 1, that falls while slopes left are negative and rises while they are positive.

    log b_{t+1} = min(0, log b_t + GAIN clip(slope / rms(slope), CLIP)): in equilibrium slopes are 0 in the mean.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.square = self.weight = 0.0  # of the slopes' mean square

    def feel(self, slope: float | None) -> float:
        """Take in a slope, and return the factor."""
        if slope is not None and math.isfinite(slope * slope):
            self.square = MEMORY * self.square + (1 - MEMORY) * slope * slope
            self.weight = MEMORY * self.weight + (1 - MEMORY)
            rms = math.sqrt(self.square / self.weight)
            if rms > 0:
                self.factor *= math.exp(GAIN * max(-CLIP, min(CLIP, slope / rms)))
                self.factor = min(max(self.factor, STRONGEST), 1.0)
        return self.factor
