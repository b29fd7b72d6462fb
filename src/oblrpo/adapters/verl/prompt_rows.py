"""The rows of a batch by prompt, after verl has re-ordered and padded them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PADDING = "pad"
"""The beginning of the uid of a row that verl appended; that of a prompt is a hexadecimal UUID."""


def rows_by_prompt(uids: Sequence[str]) -> list[list[int]]:
    """The rows of each prompt, prompts in the order of their first rows; padding is left out."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        if not uid.startswith(PADDING):
            rows.setdefault(uid, []).append(row)
    return list(rows.values())


class PromptRows:
    """The rows of each prompt: prompts in the order of their first rows, outputs in the order of their own rows.

    Args:
        uids: the uid of every row.
        valid_S: rows that count; all but padding if None.

    Raises:
        ValueError: no row counts.
    """

    def __init__(self, uids: Sequence[str], valid_S: Tensor | None = None) -> None:
        self.rows_of = rows_by_prompt(uids)
        if not self.rows_of:
            raise ValueError("the batch holds padding only.")
        self.sequences, self.size = len(uids), max(map(len, self.rows_of))
        self.row_PG = torch.tensor([own + [-1] * (self.size - len(own)) for own in self.rows_of])
        self.valid_PG = self.row_PG >= 0
        if valid_S is not None:
            self.valid_PG &= self.take(valid_S.bool(), False)

    def take(self, values_S: Tensor, fill: float | bool = 0.0) -> Tensor:
        """Return the values of rows as (P, G, ...), with `fill` where a prompt has fewer outputs."""
        values_PG = values_S.cpu()[self.row_PG.clamp(min=0)]
        missing = (self.row_PG < 0).view(*self.row_PG.shape, *[1] * (values_PG.ndim - 2))
        return values_PG.masked_fill(missing, fill)

    def put(self, values_PG: Tensor) -> Tensor:
        """Return the values of outputs as (S,), with 0 for rows of padding."""
        here_PG = self.row_PG >= 0
        values_S = values_PG.new_zeros(self.sequences)
        values_S[self.row_PG[here_PG]] = values_PG[here_PG]
        return values_S


def place_on_ranks(uids: Sequence[str], loads: Sequence[float], ranks: int) -> list[int] | None:
    """Order the rows so that each of `ranks` equal parts holds whole prompts, with loads evened out greedily.

    Padding rows fill what is left.

    Args:
        uids: the uid of every row; their number is a multiple of `ranks`.
        loads: the load of every row.
        ranks: the number of parts.

    Returns:
        Row indices in their new order, or None if the greedy way leaves no room for a prompt.
    """
    room = [len(uids) // ranks] * ranks
    carried = [0.0] * ranks
    parts: list[list[int]] = [[] for _ in room]
    for rows in sorted(rows_by_prompt(uids), key=lambda own: (-len(own), -sum(loads[row] for row in own))):
        fitting = [rank for rank in range(ranks) if room[rank] >= len(rows)]
        if not fitting:
            return None
        rank = min(fitting, key=lambda rank: (carried[rank], -room[rank]))
        parts[rank] += rows
        room[rank] -= len(rows)
        carried[rank] += sum(loads[row] for row in rows)
    padding = iter(row for row, uid in enumerate(uids) if uid.startswith(PADDING))
    for part, free in zip(parts, room, strict=True):
        part += [next(padding) for _ in range(free)]
    return [row for part in parts for row in part]
