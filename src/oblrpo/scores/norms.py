"""Squared norms of per-sequence gradients from their factors, by whichever exact way costs less."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oblrpo.scores import contributions
from oblrpo.scores.contributions import Contribution, Matrix, Outer, chunks, in_one_type, matmul, on_cuda, wide


def norm2(parts: list[Contribution], multiply: bool | None = None) -> Tensor:
    """Squared norm of each sequence's gradient of one parameter, || sum_i G_i,s ||_F^2, shape (S,).

    Several parts (a tied weight, a module called twice) bring their cross terms 2 <G_i, G_j>. Dense gradients are
    multiplied out (multiply=True), or T x T Gram products are taken (False), or whichever costs less (None).
    """
    outers = contributions.matrices(parts)
    if not outers:
        return contributions.vector_total(parts).square().sum(-1)
    outers, terms = contributions.joined(outers), []
    for i, part in enumerate(outers):
        S = part.sequences
        if isinstance(part, Outer) and part.is_lookup:
            # Rows that share an index are added up, then squared: O(S T C).
            key_N, rows_NC = contributions.sum_equal_rows(part, torch.arange(S, device=part.left.device)[:, None])
            terms.append(rows_NC.new_zeros(S).index_add(0, key_N // part.rows, rows_NC.square().sum(-1)))
        elif by_gram(part, multiply):
            terms.append(gram_norm2([part]))
        else:
            pieces = map(part.of, chunks(S, part.rows * part.columns + part.room, part.right))
            terms.append(torch.cat([contributions.row_norm2(matmul(piece.left.mT, piece.right)) for piece in pieces]))
        terms += [2 * _inner(part, second) for second in outers[i + 1 :]]
    return sum(terms[1:], terms[0])


def by_gram(part: Matrix, multiply: bool | None) -> bool:
    """Whether the norms of a part come by Gram products."""
    if part.is_lookup or multiply is not None:
        return not part.is_lookup and not multiply
    # T x T Gram products need fewer multiplications, and the factors less room, than the R x C gradient.
    return part.tokens * (part.rows + part.columns) <= part.rows * part.columns


def gram_norm2(parts: Sequence[Matrix]) -> Tensor:
    """Sum of the squared norms of dense parts *of different parameters* that have one right factor in common, (S,).

    sum_tu (sum_i left_i left_i')_tu (right right')_tu: query, key and value projections share their input's Gram
    matrix. Both factors are symmetric, so blocks above the diagonal count twice; a GPU pays more for more calls.
    """
    T, first = parts[0].tokens, parts[0].right
    size = -(-T // (1 if T < 64 or on_cuda(first) else 2 if T < 256 else 4))
    norm2_S = []
    for rows in chunks(len(first), size * size + sum(part.room for part in parts), first):
        right, *lefts = in_one_type(first[rows], *(part.of(rows).left for part in parts))
        total_S = wide(right[:0]).new_zeros(len(right))
        for start in range(0, T, size):
            for other in range(start, T, size):
                block, second = slice(start, start + size), slice(other, other + size)
                product = matmul(lefts[0][:, block], lefts[0][:, second].mT)
                for left in lefts[1:]:
                    product += matmul(left[:, block], left[:, second].mT)
                product *= matmul(right[:, block], right[:, second].mT)
                total_S += (1 if start == other else 2) * product.sum((1, 2))
        norm2_S.append(total_S)
    return torch.cat(norm2_S)


def _inner(first: Matrix, second: Matrix) -> Tensor:
    """Inner products of two parts, sum_tu (left left')_tu (right right')_tu, shape (S,)."""
    if first.is_lookup:
        first, second = second, first
    elements = max(first.tokens * second.tokens, *(p.tokens * p.rows for p in (first, second) if not p.is_lookup))
    inner = []
    for rows in chunks(first.sequences, elements, first.right):
        one, other = first.of(rows), second.of(rows)
        left, right = in_one_type(one.left, one.right)
        if other.is_lookup:
            n, T, _ = left.shape
            index_STU = other.left[:, None, :].expand(n, T, other.tokens)
            left_STU = wide(left.gather(2, index_STU))  # the columns of `one` that the index names
        else:
            left_STU = matmul(left, other.left.mT)
        inner.append((left_STU * matmul(right, other.right.mT)).sum((1, 2)))
    return torch.cat(inner)
