"""Which sequence a token of an activation belongs to: batch rows, flattened rows, packed rows."""

from __future__ import annotations

import torch
from torch import Tensor


class Layout:
    """Turns activations into (S, T, ...): tokens of one sequence in one row.

    Args:
        sequences: S.
        tokens: T, the tokens of a batch row, where known.
        sequence_ids_BL: (B, L) the sequence that each token of packed rows belongs to, negative for none; without it
            batch row s is sequence s.
    """

    def __init__(self, sequences: int, tokens: int | None, sequence_ids_BL: Tensor | None = None) -> None:
        self.sequences, self.tokens = sequences, tokens
        self.packed = sequence_ids_BL is not None
        self._stray: Tensor | None = None
        if sequence_ids_BL is not None:
            self._shape = tuple(sequence_ids_BL.shape)
            self._sequence_N = sequence_ids_BL.flatten()
            self._index_ST = _rows_of(self._sequence_N, sequences)
            self._nobodys_N = (self._sequence_N < 0).nonzero()[:, 0]

    def rows(self, activation: Tensor) -> Tensor:
        """The activation as (S, T, ...), zero where a sequence has no more tokens; else a ValueError."""
        shape = tuple(activation.shape)
        if self.packed:
            if shape[:2] == self._shape:
                activation = activation.flatten(0, 1)
            elif shape[0] != len(self._sequence_N):
                raise ValueError(f"{shape} for packed rows of shape {self._shape}")
            return take(activation, self._index_ST)
        if shape[0] == self.sequences:
            return activation
        if len(shape) == 2 and shape[0] == self.sequences * (self.tokens or shape[0] // self.sequences):
            flat: Tensor = activation.unflatten(0, (self.sequences, -1))  # a router's tokens
            return flat
        raise ValueError(f"{shape} for {self.sequences} sequences")

    def blocks(self, activation: Tensor, rows: int) -> Tensor:
        """The activation of so many batch rows as (S, n, ...); packed rows are a ValueError."""
        if self.packed:
            raise ValueError(f"{tuple(activation.shape)} for packed rows, and no rule for the layer")
        if rows != self.sequences:
            raise ValueError(f"{rows} batch rows for {self.sequences} sequences")
        blocks: Tensor = activation.unflatten(0, (rows, -1))
        return blocks

    def watch(self, grad: Tensor) -> None:
        """Notice whether tokens of packed rows that belong to no sequence matter."""
        if self.packed and len(self._nobodys_N):
            per_token = grad.flatten(0, 1) if grad.shape[:2] == self._shape else grad
            stray = per_token[self._nobodys_N].count_nonzero()
            self._stray = stray if self._stray is None else self._stray + stray

    def strays(self) -> bool:
        """Whether any token that belongs to no sequence mattered."""
        return self._stray is not None and bool(self._stray)

    def rows_at(self, position_N: Tensor, count: int) -> Tensor:
        """Where each sequence's entries are in a list of tokens at these positions of `count`: (S, T'), -1 for none."""
        if self.packed and len(self._sequence_N) == count:
            return _rows_of(self._sequence_N[position_N], self.sequences)
        if self.packed or count != self.sequences * (self.tokens or count // self.sequences):
            raise ValueError(f"{count} tokens for {self.sequences} sequences")
        return _rows_of(position_N // (count // self.sequences), self.sequences)


def _rows_of(sequence_N: Tensor, sequences: int) -> Tensor:
    """Positions of each sequence's entries in their order, (S, T'), padded with -1."""
    order_N = torch.argsort(sequence_N, stable=True)
    order_N = order_N[sequence_N[order_N] >= 0]
    owner_N = sequence_N[order_N]
    count_S = torch.bincount(owner_N, minlength=sequences)
    if len(count_S) > sequences:
        raise ValueError(f"sequence ids up to {len(count_S) - 1} for {sequences} log-probabilities")
    start_S = count_S.cumsum(0) - count_S
    index_ST = order_N.new_full((sequences, max(1, int(count_S.max()))), -1)
    index_ST[owner_N, torch.arange(len(owner_N), device=owner_N.device) - start_S[owner_N]] = order_N
    return index_ST


def take(rows: Tensor, index_ST: Tensor) -> Tensor:
    """The rows at the index, and zeros where the index is -1."""
    taken = rows[index_ST.clamp(min=0)]
    missing_ST = index_ST < 0
    return taken.masked_fill(missing_ST.view(*missing_ST.shape, *[1] * (taken.ndim - 2)), 0)
