"""What one module call adds to the score of every sequence, kept in factored form.

The score of sequence s is grad_theta log pi(o_s|q_s). A matrix parameter's share of it is a sum over tokens of outer
products, which need not be multiplied out to know its norm; a vector parameter's share is small and is kept as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Per-sequence or per-group gradients are multiplied out as many at a time as fit this many elements, or one."""


@dataclass(frozen=True)
class Outer:
    """A matrix gradient G_s = sum_t left[s, t] right[s, t]', of shape (R, C).

    Args:
        left: (S, T, R) dense, or (S, T) integer row indices standing for one-hot rows (an embedding).
        right: (S, T, C).
        rows: R.
    """

    left: Tensor
    right: Tensor
    rows: int

    @property
    def is_lookup(self) -> bool:
        """Whether the left factor is row indices."""
        return not self.left.is_floating_point()

    @property
    def columns(self) -> int:
        """C."""
        return self.right.shape[-1]


@dataclass(frozen=True)
class Vector:
    """A vector gradient, one row per sequence: value_SC."""

    value_SC: Tensor


Contribution: TypeAlias = Outer | Vector


def norm2(parts: list[Contribution]) -> Tensor:
    """Squared norm of each sequence's gradient of one parameter, || sum_i G_i,s ||_F^2, shape (S,).

    Several parts (a tied weight, a module called twice) bring their cross terms 2 <G_i, G_j>.

    Raises:
        TypeError: the parts are of both kinds.
    """
    outers = [part for part in parts if isinstance(part, Outer)]
    if not outers:
        total_SC = _total(parts)
        return total_SC.square().sum(-1)
    if len(outers) != len(parts):
        raise TypeError("one parameter has vector and matrix gradients")
    result = outers[0].right.new_zeros(outers[0].right.shape[0])
    for i, first in enumerate(outers):
        result = result + _norm2_one(first)
        for second in outers[i + 1 :]:
            result = result + 2 * _inner(first, second)
    return result


def accumulate(parts: list[Contribution], coef_S: Tensor, group_size: int, grad: Tensor) -> Tensor:
    """Add sum_s coef_s G_s to `grad`; return the squared norm of each group's sum, shape (S / group_size,).

    Group gradients are multiplied out a few at a time: as many multiplications as the one product for the whole
    batch, so the group norms cost one pass over what was computed anyway.
    """
    groups = coef_S.shape[0] // group_size
    outers = [part for part in parts if isinstance(part, Outer)]
    if not outers:
        group_PC = (_total(parts) * coef_S[:, None]).view(groups, group_size, -1).sum(1)
        grad += group_PC.sum(0).view_as(grad)
        return group_PC.square().sum(-1)
    if all(part.is_lookup for part in outers):
        return _accumulate_lookups(outers, coef_S, group_size, grad)
    at_once = max(1, CHUNK_ELEMENTS // grad.numel())
    norm2_P = []
    for start in range(0, groups, at_once):
        rows = slice(start * group_size, min(start + at_once, groups) * group_size)
        group_PRC = sum(_multiply_out(part, coef_S, rows, group_size) for part in outers)
        assert isinstance(group_PRC, Tensor)
        grad += group_PRC.sum(0)
        norm2_P.append(group_PRC.flatten(1).square().sum(-1))
    return torch.cat(norm2_P)


def _total(parts: list[Contribution]) -> Tensor:
    return torch.stack([part.value_SC for part in parts if isinstance(part, Vector)]).sum(0)


def _norm2_one(part: Outer) -> Tensor:
    """||G_s||^2 of one part by the cheapest exact way."""
    if part.is_lookup:
        return _norm2_lookup(part)
    S, T, C = part.right.shape
    if T * (part.rows + C) <= part.rows * C:
        return _inner(part, part)
    at_once = max(1, CHUNK_ELEMENTS // (part.rows * C))
    return torch.cat(
        [
            (part.left[start : start + at_once].mT @ part.right[start : start + at_once]).flatten(1).square().sum(-1)
            for start in range(0, S, at_once)
        ]
    )


def _norm2_lookup(part: Outer) -> Tensor:
    """||G_s||^2 of an embedding: add up the rows that share an index, then square; O(S T C)."""
    S = part.right.shape[0]
    owner_S = torch.arange(S, device=part.left.device)
    norm2_S = part.right.new_zeros(S)
    key_N, rows_NC = _sum_equal_rows(part, owner_S[:, None])
    return norm2_S.index_add(0, key_N // part.rows, rows_NC.square().sum(-1))


def _sum_equal_rows(part: Outer, owner_S1: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of `right` over tokens with the same (owner, index): keys owner * R + index, and rows (N, C)."""
    key_N, slot_ST = torch.unique(owner_S1 * part.rows + part.left, return_inverse=True)
    rows_NC = part.right.new_zeros(key_N.shape[0], part.columns)
    return key_N, rows_NC.index_add(0, slot_ST.flatten(), part.right.flatten(0, 1))


def _inner(first: Outer, second: Outer) -> Tensor:
    """<G_first,s, G_second,s> = sum_tu (left left')_tu (right right')_tu, the T x T Gram product; shape (S,)."""
    right_STU = first.right @ second.right.mT
    if not first.is_lookup and not second.is_lookup:
        left_STU = first.left @ second.left.mT
    elif first.is_lookup and second.is_lookup:
        left_STU = (first.left[:, :, None] == second.left[:, None, :]).to(right_STU.dtype)
    elif first.is_lookup:
        left_STU = _columns_at(second.left, first.left).mT
    else:
        left_STU = _columns_at(first.left, second.left)
    return (left_STU * right_STU).sum((1, 2))


def _columns_at(dense_STR: Tensor, index_SU: Tensor) -> Tensor:
    """dense[s, t, index[s, u]], shape (S, T, U)."""
    S, T, _ = dense_STR.shape
    return dense_STR.gather(2, index_SU[:, None, :].expand(S, T, index_SU.shape[1]))


def _multiply_out(part: Outer, coef_S: Tensor, rows: slice, group_size: int) -> Tensor:
    """Group gradients sum_{s in group} coef_s G_s for the sequences in `rows`, shape (groups, R, C)."""
    left, right, coef_S11 = part.left[rows], part.right[rows], coef_S[rows, None, None]
    groups = right.shape[0] // group_size
    if part.is_lookup:
        dense_PRC = right.new_zeros(groups, part.rows, part.columns)
        weighted = (right * coef_S11).unflatten(0, (groups, group_size)).flatten(1, 2)
        index = left.unflatten(0, (groups, group_size)).flatten(1, 2)[..., None].expand_as(weighted)
        return dense_PRC.scatter_add_(1, index, weighted)
    if part.rows <= part.columns:
        left = left * coef_S11
    else:
        right = right * coef_S11
    left = left.unflatten(0, (groups, group_size)).flatten(1, 2)
    right = right.unflatten(0, (groups, group_size)).flatten(1, 2)
    group_PRC: Tensor = left.mT @ right
    return group_PRC


def _accumulate_lookups(parts: list[Outer], coef_S: Tensor, group_size: int, grad: Tensor) -> Tensor:
    """`accumulate` for embeddings: only the rows that occur are touched."""
    owner_S1 = (torch.arange(coef_S.shape[0], device=coef_S.device) // group_size)[:, None]
    joined = Outer(
        torch.cat([part.left for part in parts], 1),
        torch.cat([part.right for part in parts], 1) * coef_S[:, None, None],
        parts[0].rows,
    )
    key_N, rows_NC = _sum_equal_rows(joined, owner_S1)
    grad.index_add_(0, key_N % joined.rows, rows_NC)
    norm2_P = rows_NC.new_zeros(coef_S.shape[0] // group_size)
    return norm2_P.index_add(0, key_N // joined.rows, rows_NC.square().sum(-1))
