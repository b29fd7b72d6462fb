"""Memory for keys and values that is there before they are: written in place, rows that have ended leave it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 128
"""Columns that are added when the room is full. A copy of all keys and values once in so many tokens costs next to
nothing, and completions that end early never take the memory of the longest that could have been."""


class Room(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values of S rows, (S, heads, columns, width), of which the first `rows` are in use.

    Args:
        read: what the layer keeps of P prompts.
        copies: number G of rows of each prompt; row p G + j is the copy j of prompt p.
        limit: most columns that will ever be needed.
    """

    def __init__(self, read: DynamicLayer, copies: int, limit: int) -> None:
        super().__init__()
        self.length: int = read.keys.shape[2]
        self.limit = limit
        self.rows = len(read.keys) * copies
        self.dtype, self.device, self.is_initialized = read.keys.dtype, read.keys.device, True
        self.keys, self.values = (_repeated(each, copies, self._columns()) for each in (read.keys, read.values))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the next tokens' keys and values behind those that are there, and return all of them."""
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            columns = max(stop, self._columns())
            self.keys = _moved(self.keys[: self.rows, :, : self.length], columns)
            self.values = _moved(self.values[: self.rows, :, : self.length], columns)
        self.keys[: self.rows, :, self.length : stop] = key_states
        self.values[: self.rows, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[: self.rows, :, :stop], self.values[: self.rows, :, :stop]

    def get_seq_length(self) -> int:
        """Return the number of columns that have been written."""
        return self.length

    def keep(self, rows: int, into: Tensor, out_of: Tensor) -> None:
        """Copy rows `out_of` onto the rows `into`, and use the first `rows` from then on."""
        for each in (self.keys, self.values):
            each[into, :, : self.length] = each[out_of, :, : self.length]
        self.rows = rows

    def _columns(self) -> int:
        return min(self.limit, self.length + BLOCK)


def _repeated(read: Tensor, copies: int, columns: int) -> Tensor:
    prompts, heads, length, width = read.shape
    room = read.new_empty(prompts, copies, heads, columns, width)
    room[:, :, :, :length] = read[:, None]
    return room.flatten(0, 1)


def _moved(used: Tensor, columns: int) -> Tensor:
    rows, heads, length, width = used.shape
    room = used.new_empty(rows, heads, columns, width)
    room[:, :, :length] = used
    return room


def cache_name(function: Callable[..., Any]) -> str:
    """Return what a model's function calls the keys and values it takes, and its results those they give.

    From transformers 5.24 on that is `cache`, and `past_key_values` warns.
    """
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def keeps_all(config: Any, columns: int) -> bool:
    """Return whether every layer of such a model keeps the keys and values of all of so many tokens, and nothing else.

    A window that is as long as the longest sequence leaves nothing out.
    """
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(
        type(each) is DynamicLayer or (type(each) is DynamicSlidingWindowLayer and each.sliding_window >= columns)
        for each in layers
    )


def is_plain(cache: Any) -> bool:
    """Return whether a cache that was used holds keys and values of all tokens in every layer, and nothing else."""
    layers = cache.layers if type(cache) is DynamicCache else []
    return bool(layers) and all(type(each) is DynamicLayer and each.get_seq_length() > 0 for each in layers)
