"""How the per-sequence gradients of one parameter are held between the backward and the update.

| store | holds | norms | any coefficients |
|---|---|---|---|
| Factors | inputs and output gradients, S T (R + C) | Gram products or multiplied out | yes |
| PerSequence | the gradients, S R C | exact | yes, without another product |
| NormsOnly | nothing; inner products and sketches if requested | exact | in a second backward (`Sums`), or none |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oblrpo.scores import contributions, gram, norms
from oblrpo.scores.contributions import Contribution, Matrix, Outer, Vector
from oblrpo.scores.trainable_layers import ParameterPiece

METHODS = ("auto", "gram", "instantiate", "two_pass", "streamed")
"""The names that `ScoreTape(method=...)` takes."""


def choose_stores(method: str, pieces: list[ParameterPiece], sequences: int) -> dict[ParameterPiece, Store]:
    """A store for each piece of the forward that was recorded (all methods but "streamed", which has one kind)."""
    if method == "two_pass":
        return {piece: NormsOnly() for piece in pieces}
    stores: dict[ParameterPiece, Store] = {}
    for piece in pieces:
        if len(piece.shape) < 2 or (method == "auto" and _worth_keeping(piece, sequences)):
            stores[piece] = PerSequence()
        else:
            stores[piece] = Factors({"gram": False, "instantiate": True}.get(method))
    return stores


def _worth_keeping(piece: ParameterPiece, sequences: int) -> bool:
    """Whether a matrix' gradients are kept multiplied out.

    Where T (R + C) >= R C they are smaller than the factors and cost less than Gram products.
    """
    if len(piece.shape) != 2 or piece.only_lookups:
        return False
    rows, columns = piece.shape
    size, tokens = piece.parameter.element_size(), piece.tokens / sequences
    # Factors are of the parameter's type, products of float32 or wider.
    return max(4, size) * rows * columns <= size * tokens * (rows + columns)


def norm2_of(stores: dict[ParameterPiece, Store]) -> Tensor:
    """Squared norms of the sequences' gradients over all stores, (S,)."""
    known, norm2_S, sharing = list[Tensor](), list[Tensor](), defaultdict[Any, list[Matrix]](list)
    for store in stores.values():
        if not isinstance(store, Factors):
            known.append(store.norm2_S)
            continue
        first = store.parts[0]
        if len(store.parts) == 1 and not isinstance(first, Vector) and norms.by_gram(first, store.multiply):
            # Layers with one input share its Gram products. All are alive: equal addresses mean the same tensor.
            dtype = first.left.dtype if isinstance(first, Outer) else None  # in which products may be taken
            sharing[first.right.data_ptr(), first.right.shape, first.right.stride(), dtype].append(first)
        else:
            norm2_S.append(norms.norm2(store.parts, store.multiply))
    norm2_S = known + norm2_S + [norms.gram_norm2(parts) for parts in sharing.values()]
    # Gram products may round a norm of nothing to a little less than nothing.
    return contributions.sum_in_widest(norm2_S).clamp(min=0)


class Factors:
    """Keeps the factors; norms come by Gram products (multiply=False), multiplied out (True), or the cheaper (None)."""

    def __init__(self, multiply: bool | None = None) -> None:
        self.multiply = multiply
        self.parts: list[Contribution] = []

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        self.parts = parts

    @property
    def room(self) -> int:
        """How many elements must be made for each sequence before its gradient can be taken."""
        return max(0 if isinstance(part, Vector) else part.room for part in self.parts)

    @property
    def lookups(self) -> list[Outer]:
        """The parts if they are lookups, all of them; else nothing."""
        lookups = [part for part in self.parts if isinstance(part, Outer) and part.is_lookup]
        return lookups if len(lookups) == len(self.parts) else []

    def group_sums(self, coef_S: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Each group's squared norm, (P,), and sum_s coef_s G_s."""
        return contributions.group_sums(self.parts, coef_S, sizes)

    def sums(self, rows: slice, coef_N: Tensor, size: int) -> Tensor:
        """The sums of coef_s G_s over groups of so many neighbouring rows, (groups, ...)."""
        outers = contributions.matrices(self.parts)
        if outers:
            return contributions.group_gradients(outers, coef_N, rows, size)
        value_NC = contributions.vector_total(self.parts)[rows] * coef_N[rows, None]
        return value_NC.view(-1, size, value_NC.shape[1]).sum(1)

    def gram(self) -> Tensor:
        """Inner products of all pairs of sequences' gradients, (S, S)."""
        return gram.gram_of_parts(self.parts, self.parts[0].sequences)[0]

    def sketch(self, directions: int, generator: torch.Generator) -> Tensor:
        """Random combinations of each gradient's rows, (S, N), whose inner products are right on average."""
        outers = contributions.matrices(self.parts)
        if not outers:
            return contributions.vector_total(self.parts)
        directions_RK = gram.directions(outers[0].rows, directions, generator, contributions.wide(outers[0].right[:0]))
        return contributions.sketch(self.parts, directions_RK).flatten(1)


class PerSequence:
    """Multiplies out once and keeps the product: norms and any weighted sum need no second product."""

    room = 0
    lookups: tuple[Outer, ...] = ()

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
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

    def group_sums(self, coef_S: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Each group's squared norm, (P,), and sum_s coef_s G_s."""
        flat_SN = self._gradient_S.flatten(1)
        sums = [_combine(flat_SN[rows], coef_S[rows], size) for rows, size in contributions.runs(sizes)]
        norms, totals = zip(*sums, strict=True)
        return torch.cat(norms), totals[0] if len(totals) == 1 else torch.stack(totals).sum(0)

    def sums(self, rows: slice, coef_N: Tensor, size: int) -> Tensor:
        """The sums of coef_s G_s over groups of so many neighbouring rows, (groups, N)."""
        gradient_PGN = self._gradient_S[rows].flatten(1).unflatten(0, (-1, size))
        return torch.bmm(coef_N[rows].to(gradient_PGN.dtype).view(-1, 1, size), gradient_PGN)[:, 0]

    def gram(self) -> Tensor:
        """Inner products of all pairs of sequences' gradients, (S, S)."""
        return gram.gram_of_rows(self._gradient_S, len(self._gradient_S))[0]

    def sketch(self, directions: int, generator: torch.Generator) -> Tensor:
        """Random combinations of each gradient's rows, (S, N), whose inner products are right on average."""
        gradient_S = self._gradient_S
        if gradient_S.ndim == 2:
            return gradient_S
        directions_RK = gram.directions(gradient_S.shape[1], directions, generator, gradient_S)
        return (directions_RK.T @ gradient_S).flatten(1)


class NormsOnly:
    """Takes norms, and the inner products and sketches that are requested, and lets the gradients go."""

    def __init__(self, group_size: int = 0, sketch: Callable[[Factors], None] | None = None) -> None:
        self._group_size, self._sketch = group_size, sketch
        self.gram_PGG: Tensor | None = None

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        if self._group_size:
            self.gram_PGG = gram.gram_of_parts(parts, self._group_size)
            self.norm2_S = self.gram_PGG.diagonal(dim1=1, dim2=2).flatten()
        else:
            self.norm2_S = norms.norm2(parts)
        if self._sketch is not None:
            factors = Factors()
            factors.take(parts)
            self._sketch(factors)


class Sums:
    """Adds up shares that carry their coefficients already, in the second pass of two, and lets them go."""

    def __init__(self, add: Callable[[Tensor], None], sizes: Sequence[int]) -> None:
        self._add, self._sizes = add, sizes
        self.norm2_P: Tensor | None = None

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        self.norm2_P, total = contributions.group_sums(parts, None, self._sizes)
        self._add(total)


Store: TypeAlias = Factors | PerSequence | NormsOnly
"""The stores that know the norms."""

Sink: TypeAlias = Store | Sums
"""What takes all shares of one parameter, once they have arrived in the backward."""


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
