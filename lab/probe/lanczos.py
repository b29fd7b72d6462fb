"""Extreme eigenvalues of a symmetric operator that is known by its products only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Direction = list[Tensor]
"""A direction in parameter space: one tensor a trained parameter."""


@dataclass(frozen=True)
class Ritz:
    """What a Krylov space shows of an operator."""

    lowest: float
    """Least Ritz value; the operator's least eigenvalue is at most that."""
    highest: float
    """Greatest Ritz value; the operator's greatest eigenvalue is at least that."""
    direction: Direction
    """Ritz vector, of length 1, of whichever of the two is larger in size."""
    value: float
    """Its Ritz value, direction' A direction."""
    residual: float
    """Error || A direction - value direction ||, by recurrence: some eigenvalue is as near to `value`."""


def lanczos(times: Callable[[Direction], Direction], start: Direction, iterations: int) -> Ritz:
    """Both ends of the spectrum from `iterations` products, kept orthogonal to all earlier directions, twice.

    Unlike power iteration it distinguishes +c from -c and reports how far it has converged. It keeps every direction:
    `iterations` times the memory of `start`. An operator that is 0 on `start` gives 0.

    Args:
        times: A v of a direction v.
        start: any direction but 0.
        iterations: products, at most; fewer where the space is exhausted.
    """
    v, basis, diagonal, beside = _scaled(start, 1 / length(start)), [], [], []
    for _ in range(iterations):
        basis.append(v)
        product = times(v)
        diagonal.append(inner(v, product))
        for u in [*basis, *basis]:
            product = _plus(product, -inner(u, product), u)
        beside.append(length(product))
        if beside[-1] <= 1e-6 * max(map(abs, [*diagonal, *beside])):
            break
        v = _scaled(product, 1 / beside[-1])
    off_K = torch.tensor(beside[:-1], dtype=torch.float64)
    values_K, vectors_KK = torch.linalg.eigh(
        torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off_K, 1) + torch.diag(off_K, -1)
    )
    chosen = int(values_K.abs().argmax())
    direction = [torch.zeros_like(part) for part in v]
    for share, u in zip(vectors_KK[:, chosen].tolist(), basis, strict=True):
        direction = _plus(direction, share, u)
    return Ritz(
        lowest=float(values_K[0]),
        highest=float(values_K[-1]),
        direction=direction,
        value=float(values_K[chosen]),
        residual=beside[-1] * abs(float(vectors_KK[-1, chosen])),
    )


def inner(a: Direction, b: Direction) -> float:
    """Inner product in float64."""
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def length(a: Direction) -> float:
    """Length of a direction."""
    return math.sqrt(inner(a, a))


def _scaled(a: Direction, factor: float) -> Direction:
    return [factor * x for x in a]


def _plus(a: Direction, factor: float, b: Direction) -> Direction:
    return [x + factor * y for x, y in zip(a, b, strict=True)]
