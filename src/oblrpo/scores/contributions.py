"""What one call of a layer adds to the score of every sequence, in factored form, and what can be had from it.

The score of sequence s is grad_theta log pi(o_s|q_s). A matrix parameter's share of it is a sum over tokens of outer
products, which need not be multiplied out to know its norm; a vector parameter's share is small and is kept as it is.
Functions take the list of all shares of one parameter: a tied weight or a layer called twice has several, and their
cross terms count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""How many elements a temporary product may have; it is made for as many sequences or groups at a time as fit."""


class _Matrix:
    """The sizes of a matrix share, as its right factor has them."""

    right: Tensor
    rows: int

    @property
    def columns(self) -> int:
        """Number of columns, C."""
        return self.right.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of tokens, T."""
        return self.right.shape[1]

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return self.right.shape[0]


@dataclass(frozen=True)
class Outer(_Matrix):
    """A matrix gradient G_s = sum_t left[s, t] right[s, t]', of shape (R, C).

    Args:
        left: (S, T, R) dense, or (S, T) integer row indices standing for one-hot rows (an embedding).
        right: (S, T, C).
        rows: R.
    """

    left: Tensor
    right: Tensor
    rows: int
    room = 0

    @property
    def is_lookup(self) -> bool:
        """Whether the left factor is row indices."""
        return not self.left.is_floating_point()

    def of(self, rows: slice) -> Outer:
        """The outer products of some of the sequences."""
        return Outer(self.left[rows], self.right[rows], self.rows)

    def left_at(self, rows: slice, columns: slice | Tensor) -> Tensor:
        """Some columns of the dense left factor of some of the sequences, (n, T, columns)."""
        return self.left[rows][..., columns]


@dataclass(frozen=True)
class Recomputed(_Matrix):
    """An `Outer` whose dense left factor is made again for the sequences in question, each time it is needed.

    Args:
        left_at: these columns, a slice or an index, of the left factor of the sequences in a slice, (n, T, columns).
        right: (S, T, C).
        rows: R.
    """

    left_at: Callable[[slice, slice | Tensor], Tensor]
    right: Tensor
    rows: int
    is_lookup = False

    @property
    def room(self) -> int:
        """How many elements must be made for each sequence before the share can be used."""
        return self.tokens * self.rows

    def of(self, rows: slice) -> Outer:
        """The outer products of some of the sequences."""
        return Outer(self.left_at(rows, slice(None)), self.right[rows], self.rows)


@dataclass(frozen=True)
class Vector:
    """A vector gradient, one row per sequence: value_SC."""

    value_SC: Tensor


Matrix: TypeAlias = Outer | Recomputed
Contribution: TypeAlias = Matrix | Vector


def group_sums(parts: list[Matrix], coef_S: Tensor, group_size: int, grad: Tensor) -> Tensor:
    """Add sum_s coef_s G_s to `grad`; return the squared norm of each group's sum, (P,).

    Group gradients are multiplied out a few at a time: as many multiplications as the one product for the whole
    batch, so the group norms cost one pass over what was computed anyway.
    """
    if all(part.is_lookup for part in parts):
        (part,) = joined(parts)
        assert isinstance(part, Outer)
        return lookup_sums(part, coef_S, group_size, grad)
    norms, room = [], grad.numel() + group_size * max(part.room for part in parts)
    for groups in chunks(parts[0].sequences // group_size, room):
        rows = slice(groups.start * group_size, groups.stop * group_size)
        group_PRC = group_gradients(parts, coef_S, rows, group_size)
        grad += group_PRC.sum(0) if group_PRC.shape[0] > 1 else group_PRC[0]
        norms.append(row_norm2(group_PRC))
    return torch.cat(norms)


def group_gradients(parts: list[Matrix], coef_S: Tensor, rows: slice, group_size: int) -> Tensor:
    """Gradients of whole groups, (groups, R, C), from as few sequences at once as a single group needs."""
    pieces = [rows]
    if rows.stop - rows.start == group_size:
        inside = chunks(group_size, max(part.room for part in parts))
        pieces = [slice(rows.start + piece.start, rows.start + piece.stop) for piece in inside]
    total: Tensor | None = None
    for piece in pieces:
        for part in parts:
            product = multiply_out(part.of(piece), coef_S[piece], min(group_size, piece.stop - piece.start))
            total = product if total is None else total.add_(product)
    assert total is not None
    return total


def sketch(parts: list[Contribution], directions_RK: Tensor) -> Tensor:
    """A few random combinations of each gradient's rows, directions' G_s, shape (S, K, C).

    One set of directions for all parts of a parameter keeps their cross terms.
    """
    sketches = []
    for part in matrices(parts):
        pieces = []
        for rows in chunks(part.sequences, part.tokens * (1 if part.is_lookup else part.rows)):
            piece = part.of(rows)
            left_STK = directions_RK[piece.left] if piece.is_lookup else wide(piece.left) @ directions_RK
            pieces.append(left_STK.mT @ wide(piece.right))
        sketches.append(torch.cat(pieces))
    return torch.stack(sketches).sum(0)


LINE = 1024
"""How many squares are summed first, in a line of their own: one long float32 sum in sequence loses digits."""


def row_norm2(rows: Tensor) -> Tensor:
    """Squared norm of each row of (n, ...), in one pass without a temporary, (n,)."""
    flat = rows.flatten(1)
    if flat.shape[1] <= LINE:
        norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
        return norms.square()
    in_lines = flat.shape[1] // LINE * LINE
    lines: Tensor = torch.linalg.vector_norm(flat[:, :in_lines].unflatten(1, (-1, LINE)), dim=-1)
    if in_lines == flat.shape[1]:
        return lines.square().sum(1)
    rest: Tensor = torch.linalg.vector_norm(flat[:, in_lines:], dim=1)
    return lines.square().sum(1) + rest.square()


def chunks(count: int, elements: int, room: int | None = None) -> Iterator[slice]:
    """Slices of range(count) of as many items of so many elements as `room` (CHUNK_ELEMENTS) allows, at least one."""
    step = max(1, (CHUNK_ELEMENTS if room is None else room) // max(1, elements))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider, so that sums of shorter types are not rounded on the way."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sum_in_widest(values: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape, in the widest of their types."""
    dtype = max((value.dtype for value in values), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.stack([value.to(dtype) for value in values]).sum(0)


def is_short_on_cuda(values: Tensor) -> bool:
    """Whether products of these may be taken as they are, with sums in float32."""
    return values.is_cuda and values.dtype in {torch.bfloat16, torch.float16}


def matmul(first: Tensor, second: Tensor) -> Tensor:
    """Batched product with float32 sums (or wider); on CUDA short types are multiplied as they are."""
    if is_short_on_cuda(first) and first.dtype == second.dtype:
        return torch.bmm(first, second, out_dtype=torch.float32)
    return wide(first) @ wide(second)


def add_matmul(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add such a product in place."""
    if is_short_on_cuda(first) and first.dtype == second.dtype:
        total += matmul(first, second)
    else:
        total.baddbmm_(wide(first), wide(second))


def vector_total(parts: list[Contribution]) -> Tensor:
    """Sum of vector shares, (S, C)."""
    values = [part.value_SC for part in parts if isinstance(part, Vector)]
    return values[0] if len(values) == 1 else torch.stack(values).sum(0)


def matrices(parts: list[Contribution]) -> list[Matrix]:
    """The parts as matrices, or nothing if they are vectors; of both kinds is a TypeError."""
    outers = [part for part in parts if not isinstance(part, Vector)]
    if outers and len(outers) != len(parts):
        raise TypeError("one parameter has vector and matrix gradients")
    return outers


def joined(parts: list[Matrix]) -> list[Matrix]:
    """The parts with those of one kind joined to one of more tokens, which leaves fewer cross terms."""
    result: list[Matrix] = [part for part in parts if isinstance(part, Recomputed)]
    for lookup in (False, True):
        same = [part for part in parts if isinstance(part, Outer) and part.is_lookup is lookup]
        if len(same) > 1:
            left, right = torch.cat([p.left for p in same], 1), torch.cat([p.right for p in same], 1)
            same = [Outer(left, right, same[0].rows)]
        result += same
    return result


def sum_equal_rows(part: Outer, owner_S1: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of `right` over tokens with the same (owner, index): keys owner * R + index, and rows (N, C)."""
    key_N, slot_ST = torch.unique(owner_S1 * part.rows + part.left, return_inverse=True)
    right = wide(part.right)
    rows_NC = right.new_zeros(key_N.shape[0], part.columns)
    return key_N, rows_NC.index_add(0, slot_ST.flatten(), right.flatten(0, 1))


def multiply_out(part: Outer, coef_S: Tensor | None, group_size: int, out: Tensor | None = None) -> Tensor:
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


def lookup_sums(part: Outer, coef_S: Tensor, group_size: int, grad: Tensor) -> Tensor:
    """The same as `group_sums` for an embedding, where only the rows that occur are touched."""
    weighted = replace(part, right=wide(part.right) * coef_S[:, None, None])
    owner_S1 = torch.arange(part.sequences, device=grad.device)[:, None] // group_size
    key_N, rows_NC = sum_equal_rows(weighted, owner_S1)
    grad.index_add_(0, key_N % len(grad), rows_NC)
    norm2_P = rows_NC.new_zeros(part.sequences // group_size)
    return norm2_P.index_add(0, key_N // len(grad), rows_NC.square().sum(-1))
