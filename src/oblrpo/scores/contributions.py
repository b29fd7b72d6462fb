"""What one call of a layer adds to the score of every sequence, in factored form, and what can be had from it.

The score of sequence s is grad_theta log pi(o_s|q_s). A matrix parameter's share of it is a sum over tokens of outer
products, which need not be multiplied out to know its norm; a vector parameter's share is small and is kept as it is.
Functions take the list of all shares of one parameter: a tied weight or a layer called twice has several, and their
cross terms count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Temporary products are made as many sequences or groups at a time as fit this many elements, or one."""


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

    @property
    def tokens(self) -> int:
        """T."""
        return self.right.shape[1]

    @property
    def sequences(self) -> int:
        """S."""
        return self.right.shape[0]

    def of(self, rows: slice) -> Outer:
        """The same for some of the sequences."""
        return Outer(self.left[rows], self.right[rows], self.rows)


@dataclass(frozen=True)
class Vector:
    """A vector gradient, one row per sequence: value_SC."""

    value_SC: Tensor

    @property
    def sequences(self) -> int:
        """S."""
        return self.value_SC.shape[0]


Contribution: TypeAlias = Outer | Vector


def norm2(parts: list[Contribution], multiply: bool | None = None) -> Tensor:
    """Squared norm of each sequence's gradient of one parameter, || sum_i G_i,s ||_F^2, shape (S,).

    Several parts (a tied weight, a module called twice) bring their cross terms 2 <G_i, G_j>.

    Args:
        parts: the parameter's shares.
        multiply: True multiplies dense gradients out, False takes T x T Gram products, None whichever costs less.

    Raises:
        TypeError: the parts are of both kinds.
    """
    outers = _outers(parts)
    if not outers:
        return vector_total(parts).square().sum(-1)
    outers = _joined(outers)
    total_S = _norm2_one(outers[0], multiply)
    for i, first in enumerate(outers):
        if i:
            total_S = total_S + _norm2_one(first, multiply)
        for second in outers[i + 1 :]:
            total_S = total_S + 2 * _inner(first, second)
    return total_S


def multiply_out(parts: list[Contribution], rows: slice, out: Tensor | None = None) -> Tensor:
    """The gradients themselves of the sequences in `rows`, shape (n, R, C) or (n, C), optionally into `out`."""
    outers = _outers(parts)
    if not outers:
        value_SC = vector_total(parts)[rows]
        return value_SC if out is None else out.copy_(value_SC)
    first, *others = outers
    total = _product(first.of(rows), None, 1, out)
    for part in others:
        total += _product(part.of(rows), None, 1)
    return total


def group_sums(parts: list[Contribution], coef_S: Tensor | None, group_size: int, grad: Tensor) -> Tensor:
    """Add sum_s coef_s G_s to `grad`; return the squared norm of each group's sum, shape (S / group_size,).

    Group gradients are multiplied out a few at a time: as many multiplications as the one product for the whole
    batch, so the group norms cost one pass over what was computed anyway. No coefficients means ones.
    """
    outers = _outers(parts)
    groups = parts[0].sequences // group_size
    if not outers:
        value_SC = vector_total(parts)
        value_SC = value_SC if coef_S is None else value_SC * coef_S[:, None]
        group_PC = value_SC.view(groups, group_size, -1).sum(1)
        grad += group_PC.sum(0).view_as(grad)
        return group_PC.square().sum(-1)
    if all(part.is_lookup for part in outers):
        return _group_sums_of_lookups(outers, coef_S, group_size, grad)
    norm2_P = []
    for chunk in chunks(groups, grad.numel()):
        rows = slice(chunk.start * group_size, chunk.stop * group_size)
        coef = None if coef_S is None else coef_S[rows]
        group_PRC = _product(outers[0].of(rows), coef, group_size)
        for part in outers[1:]:
            group_PRC += _product(part.of(rows), coef, group_size)
        grad += group_PRC.sum(0) if group_PRC.shape[0] > 1 else group_PRC[0]
        norm2_P.append(row_norm2(group_PRC))
    return torch.cat(norm2_P)


def sketch(parts: list[Contribution], directions_RK: Tensor) -> Tensor:
    """Directions' G_s, shape (S, K, C): a few random combinations of the gradient's rows.

    One set of directions for all parts of a parameter keeps their cross terms.
    """
    first, *others = [_sketch_one(part, directions_RK) for part in _outers(parts)]
    return sum(others, first)


def _sketch_one(part: Outer, directions_RK: Tensor) -> Tensor:
    sketches = []
    for rows in chunks(part.sequences, part.tokens * (1 if part.is_lookup else part.rows)):
        left = part.left[rows]
        left_STK = directions_RK[left] if part.is_lookup else wide(left) @ directions_RK
        sketches.append(left_STK.mT @ wide(part.right[rows]))
    return torch.cat(sketches)


def row_norm2(rows: Tensor) -> Tensor:
    """Squared norm of each row of (n, ...), in one pass without a temporary."""
    return torch.linalg.vector_norm(rows.flatten(1), dim=1).square()


def chunks(count: int, elements: int) -> Iterator[slice]:
    """Slices of range(count) of as many items of so many elements as CHUNK_ELEMENTS allows, at least one."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def wide(tensor: Tensor) -> Tensor:
    """As float32 or wider: sums of shorter types are not rounded on the way."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def matmul(first: Tensor, second: Tensor) -> Tensor:
    """Batched product with float32 sums (or wider); on CUDA short types are multiplied as they are."""
    if first.is_cuda and first.dtype in {torch.bfloat16, torch.float16}:
        return torch.bmm(first, second, out_dtype=torch.float32)
    return wide(first) @ wide(second)


def vector_total(parts: list[Contribution]) -> Tensor:
    """Sum of vector shares, (S, C)."""
    values = [part.value_SC for part in parts if isinstance(part, Vector)]
    return values[0] if len(values) == 1 else torch.stack(values).sum(0)


def _outers(parts: list[Contribution]) -> list[Outer]:
    outers = [part for part in parts if isinstance(part, Outer)]
    if outers and len(outers) != len(parts):
        raise TypeError("one parameter has vector and matrix gradients")
    return outers


def _joined(parts: list[Outer]) -> list[Outer]:
    """Parts of one kind as one part with more tokens (a head called on chunks of tokens): fewer cross terms."""
    joined = []
    for kind in (False, True):
        same = [part for part in parts if part.is_lookup is kind]
        if len(same) > 1:
            left, right = torch.cat([p.left for p in same], 1), torch.cat([p.right for p in same], 1)
            same = [Outer(left, right, same[0].rows)]
        joined += same
    return joined


def gram_is_cheaper(tokens: int, rows: int, columns: int) -> bool:
    """Whether T x T Gram products need fewer multiplications, and the factors less room, than the R x C gradient."""
    return tokens * (rows + columns) <= rows * columns


def _norm2_one(part: Outer, multiply: bool | None) -> Tensor:
    """||G_s||^2 of one part by the cheapest exact way."""
    if part.is_lookup:
        return _norm2_lookup(part)
    T, R, C = part.tokens, part.rows, part.columns
    if multiply is None:
        multiply = not gram_is_cheaper(T, R, C)
    one = _norm2_by_product if multiply else _norm2_by_gram
    elements = R * C if multiply else T * T
    return torch.cat([one(part.of(rows)) for rows in chunks(part.sequences, elements)])


def _norm2_by_product(part: Outer) -> Tensor:
    return row_norm2(matmul(part.left.mT, part.right))


def _norm2_by_gram(part: Outer) -> Tensor:
    """sum_tu (left left')_tu (right right')_tu; both are symmetric, so blocks above the diagonal count twice."""
    T = part.tokens
    left, right = wide(part.left), wide(part.right)
    size = -(-T // (1 if T < 64 else 2 if T < 256 else 4))
    total_S = right.new_zeros(part.sequences)
    for start in range(0, T, size):
        for other in range(start, T, size):
            block, second = slice(start, start + size), slice(other, other + size)
            product = (left[:, block] @ left[:, second].mT) * (right[:, block] @ right[:, second].mT)
            total_S += (1 if start == other else 2) * product.sum((1, 2))
    return total_S


def _norm2_lookup(part: Outer) -> Tensor:
    """||G_s||^2 of an embedding: add up the rows that share an index, then square; O(S T C)."""
    S = part.sequences
    owner_S = torch.arange(S, device=part.left.device)
    key_N, rows_NC = _sum_equal_rows(part, owner_S[:, None])
    return rows_NC.new_zeros(S).index_add(0, key_N // part.rows, rows_NC.square().sum(-1))


def _sum_equal_rows(part: Outer, owner_S1: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of `right` over tokens with the same (owner, index): keys owner * R + index, and rows (N, C)."""
    key_N, slot_ST = torch.unique(owner_S1 * part.rows + part.left, return_inverse=True)
    right = wide(part.right)
    rows_NC = right.new_zeros(key_N.shape[0], part.columns)
    return key_N, rows_NC.index_add(0, slot_ST.flatten(), right.flatten(0, 1))


def _inner(first: Outer, second: Outer) -> Tensor:
    """<G_first,s, G_second,s> = sum_tu (left left')_tu (right right')_tu for a dense part and a lookup; shape (S,)."""
    if first.is_lookup:
        first, second = second, first
    per_row = first.tokens * second.tokens
    inner = []
    for rows in chunks(first.sequences, per_row):
        left_STU = wide(_columns_at(first.left[rows], second.left[rows]))
        inner.append((left_STU * matmul(first.right[rows], second.right[rows].mT)).sum((1, 2)))
    return torch.cat(inner)


def _columns_at(dense_STR: Tensor, index_SU: Tensor) -> Tensor:
    """dense[s, t, index[s, u]], shape (S, T, U)."""
    S, T, _ = dense_STR.shape
    return dense_STR.gather(2, index_SU[:, None, :].expand(S, T, index_SU.shape[1]))


def _product(part: Outer, coef_S: Tensor | None, group_size: int, out: Tensor | None = None) -> Tensor:
    """Group gradients sum_{s in group} coef_s G_s, shape (groups, R, C)."""
    left, right = part.left, part.right
    groups = part.sequences // group_size
    if coef_S is not None:
        if part.is_lookup or part.rows > part.columns:
            right = _scaled(right, coef_S)
        else:
            left = _scaled(left, coef_S)
    if group_size > 1:
        left, right = (x.unflatten(0, (groups, group_size)).flatten(1, 2) for x in (left, right))
    if part.is_lookup:
        right = wide(right)
        out = right.new_zeros(groups, part.rows, part.columns) if out is None else out.zero_()
        return out.scatter_add_(1, left[..., None].expand_as(right), right)
    if out is None:
        return matmul(left.mT, right)
    return torch.bmm(wide(left).mT, wide(right), out=out)


def _scaled(rows_STC: Tensor, coef_S: Tensor) -> Tensor:
    """Rows times coefficients, in a type that `matmul` multiplies together with the other factor's."""
    scaled = wide(rows_STC) * coef_S[:, None, None]
    return scaled.to(rows_STC.dtype) if rows_STC.is_cuda else scaled


def _group_sums_of_lookups(parts: list[Outer], coef_S: Tensor | None, group_size: int, grad: Tensor) -> Tensor:
    """`group_sums` for embeddings: only the rows that occur are touched."""
    (joined,) = _joined(parts)
    if coef_S is not None:
        joined = Outer(joined.left, wide(joined.right) * coef_S[:, None, None], joined.rows)
    owner_S1 = (torch.arange(joined.sequences, device=grad.device) // group_size)[:, None]
    key_N, rows_NC = _sum_equal_rows(joined, owner_S1)
    grad.index_add_(0, key_N % joined.rows, rows_NC)
    norm2_P = rows_NC.new_zeros(joined.sequences // group_size)
    return norm2_P.index_add(0, key_N // joined.rows, rows_NC.square().sum(-1))
