"""What one call of a layer adds to the score of every sequence, in factored form, and what can be had from it.

The score of sequence s is grad_theta log pi(o_s|q_s). A matrix parameter's share of it is a sum over tokens of outer
products, which need not be multiplied out to know its norm; a vector parameter's share is small and is kept as it is.
Functions take the list of all shares of one parameter: a tied weight or a layer called twice has several, and their
cross terms count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK_ELEMENTS, CUDA_ELEMENTS = 1 << 22, 1 << 26
"""How many elements a temporary product may have, on a CPU, and on a GPU, which pays for each call (256 MB in float32):
it is made for as many sequences or groups at a time as fit, and for one if none does."""
SHORT = (torch.bfloat16, torch.float16)
AS_ON_CUDA = False
"""Whether work on a CPU is laid out as for a GPU, for tests of that."""


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


def group_sums(parts: list[Matrix], coef_S: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The squared norm of each group's sum_s coef_s G_s, (P,), and the sum over all groups, a tensor of its own.

    Group gradients are multiplied out a few at a time: as many multiplications as the one product for the whole
    batch, so the group norms cost one pass over what was computed anyway.
    """
    first, norms = parts[0], []
    if all(part.is_lookup for part in parts):
        (part,) = joined(parts)
        assert isinstance(part, Outer)
        return lookup_sums(part, coef_S, group_size)
    total: Tensor | None = None
    room = first.rows * first.columns + group_size * max(part.room for part in parts)
    for groups in chunks(first.sequences // group_size, room, first.right):
        rows = slice(groups.start * group_size, groups.stop * group_size)
        group_PRC = group_gradients(parts, coef_S, rows, group_size)
        total = added(total, group_PRC)
        norms.append(row_norm2(group_PRC))
    assert total is not None
    return torch.cat(norms), total


def added(total: Tensor | None, shares: Tensor) -> Tensor:
    """The total, which is written to, and these shares, (n, ...); nobody else may hold them."""
    share = shares.sum(0) if len(shares) > 1 else shares[0]
    return share if total is None else total.add_(share)


def group_gradients(parts: list[Matrix], coef_S: Tensor, rows: slice, group_size: int) -> Tensor:
    """Gradients of whole groups, (groups, R, C), from as few sequences at once as a single group needs."""
    pieces, first = [rows], parts[0]
    if rows.stop - rows.start == group_size:
        inside = chunks(group_size, max(part.room for part in parts), first.right, first.rows * first.columns)
        pieces = [slice(rows.start + piece.start, rows.start + piece.stop) for piece in inside]
    total: Tensor | None = None
    for piece in pieces:
        for part in sorted(parts, key=lambda part: part.is_lookup):  # these touch few rows of what is there
            groups_of = min(group_size, piece.stop - piece.start)
            total = multiply_out(part.of(piece), coef_S[piece], groups_of, total, add=True)
    assert total is not None
    return total


def sketch(parts: list[Contribution], directions_RK: Tensor) -> Tensor:
    """A few random combinations of each gradient's rows, directions' G_s, shape (S, K, C).

    One set of directions for all parts of a parameter keeps their cross terms.
    """
    sketches = []
    for part in matrices(parts):
        pieces = []
        for rows in chunks(part.sequences, part.tokens * (1 if part.is_lookup else part.rows), part.right):
            if isinstance(part, Outer) and part.is_lookup:
                left_STK = directions_RK[part.left[rows]]
            else:  # of a head, whose factor is made again, a part of the vocabulary at a time
                width = (rows.stop - rows.start) * part.tokens if part.room else 1
                blocks = chunks(part.rows, width, part.right)
                shares = (wide(part.left_at(rows, block)) @ directions_RK[block] for block in blocks)
                left_STK = reduce(Tensor.add_, shares)
            pieces.append(matmul(left_STK.mT, part.right[rows]))
        sketches.append(torch.cat(pieces))
    return torch.stack(sketches).sum(0)


LINE = 1024
"""How many squares are summed first, in a line of their own: one long float32 sum in sequence loses digits."""


def row_norm2(rows: Tensor) -> Tensor:
    """Squared norm of each row of (n, ...), in one pass without a temporary, (n,)."""
    flat, dtype = rows.flatten(1), wide(rows[:0]).dtype
    if flat.shape[1] <= LINE:
        norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=dtype)
        return norms.square()
    in_lines = flat.shape[1] // LINE * LINE
    lines: Tensor = torch.linalg.vector_norm(flat[:, :in_lines].unflatten(1, (-1, LINE)), dim=-1, dtype=dtype)
    if in_lines == flat.shape[1]:
        return lines.square().sum(1)
    rest: Tensor = torch.linalg.vector_norm(flat[:, in_lines:], dim=1, dtype=dtype)
    return lines.square().sum(1) + rest.square()


def chunks(count: int, elements: int, like: Tensor, own: int = 0, cpu: int | None = None) -> Iterator[slice]:
    """Slices of range(count) of as many items of so many elements as there is room for, at least one.

    On a GPU (where `like` is) that is room for CUDA_ELEMENTS, or as many as what is computed has of its own; on a CPU
    for CHUNK_ELEMENTS, if not for so many.
    """
    room = max(CUDA_ELEMENTS, own) if on_cuda(like) else cpu or CHUNK_ELEMENTS
    step = max(1, room // max(1, elements))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider, so that sums of shorter types are not rounded on the way."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sum_in_widest(values: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape, in the widest of their types."""
    dtype = max((value.dtype for value in values), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.stack([value.to(dtype) for value in values]).sum(0)


def on_cuda(values: Tensor) -> bool:
    """Whether work on these is laid out for a GPU: short products, few and large calls, and no look at values."""
    return AS_ON_CUDA or values.is_cuda


def short_type(*factors: Tensor) -> torch.dtype | None:
    """The type in which a product is taken on CUDA, as autograd takes it: the short one of its factors', if any is."""
    return next((factor.dtype for factor in factors if on_cuda(factor) and factor.dtype in SHORT), None)


def in_one_type(*factors: Tensor) -> list[Tensor]:
    """Factors in the type in which their products are taken: in their `short_type`, else in float32 or wider."""
    short = short_type(*factors)
    return [wide(factor) if short is None else factor.to(short) for factor in factors]


def matmul(first: Tensor, second: Tensor, out: Tensor | None = None) -> Tensor:
    """Product, batched or not, of factors `in_one_type`, with sums in float32 or wider."""
    first, second = in_one_type(first, second)
    if first.dtype not in SHORT:
        return torch.matmul(first, second, out=out)
    return short_matmul(first, second, out)


def short_matmul(first: Tensor, second: Tensor, out: Tensor | None = None) -> Tensor:
    """Such a product of short factors, which CUDA alone takes."""
    if second.ndim == 2:
        first_N, shape = first.flatten(0, -2), (*first.shape[:-1], second.shape[1])
        return short_matmul(first_N[None], second[None]).view(shape)
    return torch.bmm(first, second, out_dtype=torch.float32, out=out)


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
    key_N, slot_N = equal((owner_S1 * part.rows + part.left).flatten())
    right = wide(part.right)
    return key_N, right.new_zeros(len(key_N), part.columns).index_add(0, slot_N, right.flatten(0, 1))


def equal(keys_N: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones of these keys, ascending, then as many zeros as keys repeat, and which of them each is.

    To know how many differ (`torch.unique`), the host would have to wait for a GPU.
    """
    sorted_N, order_N = keys_N.sort()
    slot_N = torch.empty_like(order_N).index_copy_(0, order_N, (sorted_N.diff(prepend=sorted_N[:1]) != 0).cumsum(0))
    return torch.zeros_like(keys_N).index_copy_(0, slot_N, keys_N), slot_N


def multiply_out(
    part: Outer, coef_S: Tensor | None, group_size: int, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """Group gradients sum_{s in group} coef_s G_s, (groups, R, C), written or added to `out` if there is one."""
    left, right = part.left, part.right
    groups = part.sequences // group_size
    if coef_S is not None:
        coef_S11, short = coef_S[:, None, None], None if part.is_lookup else short_type(left, right)
        if part.is_lookup or part.rows > part.columns:
            right = scaled(right, coef_S11, short)
        else:
            left = scaled(left, coef_S11, short)
    if group_size > 1:
        left, right = (x.unflatten(0, (groups, group_size)).flatten(1, 2) for x in (left, right))
    if part.is_lookup:
        right = wide(right)
        if out is None or not add:
            out = right.new_zeros(groups, part.rows, part.columns) if out is None else out.zero_()
        return out.scatter_add_(1, left[..., None].expand_as(right), right)
    if out is None or not add:
        return matmul(left.mT, right, out)
    return out.add_(matmul(left.mT, right))


def scaled(values: Tensor, factors: Tensor, short: torch.dtype | None) -> Tensor:
    """Products of elements, in float32 or wider or rounded once to a short type."""
    if short is None:
        return wide(values) * factors
    return torch.mul(values, factors, out=torch.empty_like(values, dtype=short))


def lookup_sums(part: Outer, coef_S: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The same as `group_sums` for an embedding, where only the rows that occur are touched."""
    weighted = replace(part, right=wide(part.right) * coef_S[:, None, None])
    owner_S1 = torch.arange(part.sequences, device=coef_S.device)[:, None] // group_size
    key_N, rows_NC = sum_equal_rows(weighted, owner_S1)
    norm2_P = rows_NC.new_zeros(part.sequences // group_size)
    norm2_P.index_add_(0, key_N // part.rows, rows_NC.square().sum(-1))
    return norm2_P, rows_NC.new_zeros(part.rows, part.columns).index_add_(0, key_N % part.rows, rows_NC)
