"""Which store each parameter gets, by method and size."""

from __future__ import annotations

from torch import Tensor

from oblrpo.scores import norms
from oblrpo.scores.stores import Factors, NormsOnly, PerSequence, Store
from oblrpo.scores.trainable_layers import ParameterPiece

METHODS = ("auto", "gram", "instantiate", "two_pass", "streamed")
"""The names that `ScoreTape(method=...)` takes."""


def choose(method: str, pieces: list[ParameterPiece], sequences: int) -> dict[ParameterPiece, Store]:
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


def norm2(stores: list[Store]) -> list[Tensor]:
    """Squared norms whose sum is that over all stores, (S,) each."""
    factors = [store for store in stores if type(store) is Factors]
    others = [store.norm2() for store in stores if type(store) is not Factors]
    return others + (norms.total_norm2([store.parts for store in factors], factors[0].multiply) if factors else [])
