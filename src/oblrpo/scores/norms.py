"""Squared norms of per-sequence gradients from their factors, by whichever exact way costs less."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oblrpo.scores import contributions
from oblrpo.scores.contributions import Contribution, Matrix, chunks, in_one_type, matmul, on_cuda, wide
from oblrpo.scores.gram import gram_of_parts, of_dense


def norm2(parts: list[Contribution], multiply: bool | None = None) -> Tensor:
    """Squared norm of each sequence's gradient of one parameter, || sum_i G_i,s ||_F^2, shape (S,).

    A dense gradient is multiplied out (multiply=True), or T x T Gram products are taken (False), or whichever costs
    less (None). Several parts (a tied weight, a module called twice) bring their cross terms 2 <G_i, G_j>, and go the
    way that costs less.
    """
    outers = contributions.matrices(parts)
    if not outers:
        return contributions.vector_total(parts).square().sum(-1)
    if len(outers) > 1 or outers[0].is_lookup:
        return gram_of_parts(parts, 1).flatten()
    return gram_norm2(outers) if by_gram(outers[0], multiply) else of_dense(outers, 1).flatten()


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
