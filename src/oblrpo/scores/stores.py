"""How the per-sequence gradients of one parameter are held between the backward and the update.

| store | holds | norms |
|---|---|---|
| Factors | inputs and output gradients, S T (R + C) | Gram products or multiplied out |
| PerSequence | the gradients, S R C, of which any sum needs no other product | of what it holds |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oblrpo.scores import contributions, norms
from oblrpo.scores.contributions import Contribution, Matrix, Outer

METHODS = ("auto", "gram", "instantiate", "streamed")
"""The names that `ScoreTape(method=...)` takes."""


def held(method: str, parts: list[Contribution]) -> Store:
    """All shares of one parameter as the method holds them (any method but "streamed", which holds nothing)."""
    outers = contributions.matrices(parts)
    if not outers or (method == "auto" and _worth_keeping(outers)):
        return PerSequence(parts)
    return Factors(outers, {"gram": False, "instantiate": True}.get(method))


def _worth_keeping(parts: list[Matrix]) -> bool:
    """Whether a matrix' gradients are kept multiplied out.

    Where T (R + C) >= R C they are smaller than the factors and cost less than Gram products. A head's factors are its
    input alone, as the other is made again: its gradients are kept only where they are small.
    """
    first, tokens = parts[0], sum(part.tokens for part in parts)
    made_again = any(part.room for part in parts) and first.rows * first.columns > contributions.CHUNK_ELEMENTS
    if made_again or all(part.is_lookup for part in parts):
        return False
    size = first.right.element_size()  # of factors; products are of float32 or wider
    return max(4, size) * first.rows * first.columns <= size * tokens * (first.rows + first.columns)


def norm2_of(known: Iterable[Tensor], stores: Iterable[Store]) -> Tensor:
    """Squared norms of the sequences' gradients, (S,): those of some parameters, which are known, and of the stores."""
    norm2_S, sharing = list(known), defaultdict[Any, list[Matrix]](list)
    for store in stores:
        if isinstance(store, PerSequence):
            norm2_S.append(store.norm2_S)
            continue
        first = store.parts[0]
        if len(store.parts) == 1 and norms.by_gram(first, store.multiply):
            # Layers with one input share its Gram products. All are alive: equal addresses mean the same tensor.
            dtype = first.left.dtype if isinstance(first, Outer) else None  # in which products may be taken
            sharing[first.right.data_ptr(), first.right.shape, first.right.stride(), dtype].append(first)
        else:
            norm2_S.append(norms.norm2([*store.parts], store.multiply))
    norm2_S += [norms.gram_norm2(parts) for parts in sharing.values()]
    # Gram products may round a norm of nothing to a little less than nothing.
    return contributions.sum_in_widest(norm2_S).clamp(min=0)


@dataclass(frozen=True)
class Factors:
    """Keeps the factors; norms come by Gram products (multiply=False), multiplied out (True), or the cheaper (None)."""

    parts: list[Matrix]
    multiply: bool | None

    def group_sums(self, coef_S: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Each group's squared norm, (P,), and sum_s coef_s G_s."""
        return contributions.group_sums(self.parts, coef_S, group_size)


class PerSequence:
    """Multiplies out once and keeps the product: norms and any weighted sum need no second product."""

    def __init__(self, parts: list[Contribution]) -> None:
        outers = contributions.matrices(parts)
        if not outers:
            self._gradient_S = contributions.vector_total(parts)
            self.norm2_S = contributions.row_norm2(self._gradient_S)
            return
        first, norm2_S = outers[0], []
        self._gradient_S = contributions.wide(first.right[:0]).new_empty(first.sequences, first.rows, first.columns)
        room = max(part.room for part in outers)  # for factors that are made on the way
        for rows in contributions.chunks(first.sequences, first.rows * first.columns + room, first.right):
            total = contributions.multiply_out(first.of(rows), None, 1, out=self._gradient_S[rows])
            for part in outers[1:]:
                contributions.multiply_out(part.of(rows), None, 1, total, add=True)
            norm2_S.append(contributions.row_norm2(total))
        self.norm2_S = torch.cat(norm2_S)

    def group_sums(self, coef_S: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Each group's squared norm, (P,), and sum_s coef_s G_s."""
        return _combine(self._gradient_S.flatten(1), coef_S, group_size)


Store: TypeAlias = Factors | PerSequence


def _combine(gradient_SN: Tensor, coef_S: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Each group's squared norm, (P,), and the weighted sum of all rows; of a cache's worth of columns at once.

    A GPU takes all columns together, which needs no more room than the rows themselves.
    """
    groups, N = coef_S.shape[0] // group_size, gradient_SN.shape[1]
    coef_P1G = coef_S.to(gradient_SN.dtype).view(groups, 1, group_size)
    rows_PGN = gradient_SN.view(groups, group_size, N)
    norm2_P, total_N = gradient_SN.new_zeros(groups), gradient_SN.new_empty(N)
    width = N if contributions.on_cuda(gradient_SN) else max(1, (1 << 20) // groups)
    for start in range(0, N, width):
        columns = slice(start, start + width)
        group_P1N = total_N[None, None, columns] if groups == 1 else None
        group_P1N = torch.bmm(coef_P1G, rows_PGN[:, :, columns], out=group_P1N)
        if groups > 1:
            torch.sum(group_P1N[:, 0], 0, out=total_N[columns])
        norm2_P += contributions.row_norm2(group_P1N[:, 0])
    return norm2_P, total_N
