"""The models and batches that `benchmarks.trl_steps` and `benchmarks.passes` measure."""

from typing import NamedTuple

G = 8
"""Completions of a prompt."""


class Shape(NamedTuple):
    """A model and a batch."""

    hidden_size: int
    layers: int
    rows: int
    """Completions of a step."""
    parts: int
    """Micro-batches."""
    tokens: int
    """Of a completion."""


SHAPES = {
    "tokens": Shape(128, 4, 128, 1, 16),
    "words": Shape(256, 4, 32, 2, 64),
    "answers": Shape(256, 6, 16, 2, 192),
}
REAL = Shape(576, 30, 16, 2, 24)
