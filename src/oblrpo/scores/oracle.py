"""Slow, exact references with the meaning of `ScoreTape`: what it is tested against, and what a user can check with.

They run one backward per sequence, and hold the S gradients of the model at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def scores(model: nn.Module, logps_S: Tensor) -> list[list[Tensor]]:
    """Scores grad_theta logps_S[s] by loop autograd: a list over s of a list over trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(logp, parameters, retain_graph=True, allow_unused=True) for logp in logps_S]
    return [[torch.zeros_like(p) if g is None else g for p, g in zip(parameters, row, strict=True)] for row in rows]


def norm2(model: nn.Module, logps_S: Tensor) -> Tensor:
    """Squared score norms || grad_theta logps_S[s] ||^2, shape (S,), from one backward per sequence."""
    return torch.stack([_norm2(score) for score in scores(model, logps_S)])


def accumulate(model: nn.Module, logps_S: Tensor, coef_S: Tensor, group_size: int = 1) -> Tensor:
    """Add to `.grad` by loop autograd; return each group's squared norm, (S / G,), as `ScoreTape.accumulate` does."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    per_sequence = scores(model, logps_S)
    group_norm2 = []
    for start in range(0, len(per_sequence), group_size):
        members = range(start, start + group_size)
        group = [sum(coef_S[s] * per_sequence[s][i] for s in members) for i in range(len(parameters))]
        for parameter, g in zip(parameters, group, strict=True):
            parameter.grad = g if parameter.grad is None else parameter.grad + g  # type: ignore[assignment]
        group_norm2.append(_norm2(group))  # type: ignore[arg-type]
    return torch.stack(group_norm2)


def _norm2(score: list[Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in score]).sum()
