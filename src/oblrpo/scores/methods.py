"""Which store each parameter gets, by method, size and memory budget; and coefficients in a basis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oblrpo.scores import norms
from oblrpo.scores.owners import Slot
from oblrpo.scores.stores import Factors, NormsOnly, PerSequence, Projected, Store

METHODS = ("auto", "gram", "instantiate", "folds", "two_pass", "projected", "streamed")
"""The names that `ScoreTape(method=...)` takes."""


def choose(
    method: str, slots: list[Slot], sequences: int, memory_budget: int, projected: Callable[[], Projected]
) -> dict[Slot, Store]:
    """A store for each slot of the forward that was recorded (all methods but "folds", whose stores outlive it)."""
    if method == "two_pass":
        return {slot: NormsOnly() for slot in slots}
    stores: dict[Slot, Store] = {}
    for slot in slots:
        if len(slot.shape) < 2:
            stores[slot] = PerSequence()
        elif method == "projected":
            stores[slot] = projected()
        else:
            stores[slot] = Factors({"gram": False, "instantiate": True}.get(method))
    if method == "auto":
        for slot in _worth_keeping(slots, sequences, memory_budget):
            stores[slot] = PerSequence()
    return stores


def _worth_keeping(slots: list[Slot], sequences: int, memory_budget: int) -> list[Slot]:
    """Matrices whose gradients are kept multiplied out.

    Where T (R + C) >= R C they are smaller than the factors and cost less than Gram products: always. Elsewhere they
    save the T^2 (R + C) of the Gram products for R C - T (R + C) more numbers a sequence: while the budget lasts,
    those first that save most for their size.
    """
    kept, candidates = [], []
    for slot in slots:
        if len(slot.shape) != 2 or slot.only_lookups:
            continue
        rows, columns = slot.shape
        tokens = slot.tokens / sequences
        size = slot.parameter.element_size()  # of the factors; products are float32 or wider
        extra = sequences * (max(4, size) * rows * columns - size * tokens * (rows + columns))
        if extra <= 0:
            kept.append(slot)
        else:
            candidates.append((sequences * tokens**2 * (rows + columns) / extra, extra, slot))
    for _, extra, slot in sorted(candidates, key=lambda each: -each[0]):
        if extra <= memory_budget:
            memory_budget -= int(extra)
            kept.append(slot)
    return kept


def norm2(stores: list[Store]) -> list[Tensor]:
    """Squared norms whose sum is that over all stores, (S,) each."""
    factors = [store for store in stores if type(store) is Factors]
    others = [store.norm2() for store in stores if type(store) is not Factors]
    return others + (norms.total_norm2([store.parts for store in factors], factors[0].multiply) if factors else [])


def in_basis(coef_S: Tensor, basis_SK: Tensor, group_size: int) -> Tensor:
    """The coefficients of each group's K columns that give coef_S, (P, K).

    Raises:
        ValueError: coef_S is no combination of the columns.
    """
    coef_PG1 = coef_S.double().view(-1, group_size, 1)
    basis_PGK = basis_SK.double().view(len(coef_PG1), group_size, -1)
    in_basis_PK1: Tensor = torch.linalg.pinv(basis_PGK, rtol=1e-10) @ coef_PG1
    error = (basis_PGK @ in_basis_PK1 - coef_PG1).abs().amax()
    if not error <= 1e-5 * coef_PG1.abs().amax():
        raise ValueError("the coefficients are no combination of the columns of basis_SK that record was given.")
    return in_basis_PK1[..., 0]
