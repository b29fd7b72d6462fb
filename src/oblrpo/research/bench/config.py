"""Settings of `oblrpo bench`; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class BenchConfig:
    """Compare ways to have squared score norms and the weighted gradient: time, operations, memory and error.

    Every figure is a ratio to a plain forward and backward in the same run. Examples: `oblrpo bench scores`;
    `oblrpo bench scores --shape long --methods "exact (auto)" projected`; `oblrpo bench scores --scaling`;
    `oblrpo bench scores --shape qwen3-4b --sequences 2 --tokens 4096 --device cuda --dtype bfloat16`.
    """

    what: Annotated[Literal["scores"], tyro.conf.Positional] = "scores"
    """Which benchmark to run."""
    shape: tuple[str, ...] = ("short", "medium", "long")
    """Shapes to measure: short, medium, long, qwen3-4b."""
    methods: tuple[str, ...] = ()
    """Rows to measure; all if none is named."""
    scaling: bool = False
    """Measure the medium shape with more sequences, tokens or parameters instead."""
    sequences: int = 0
    """Use this many sequences instead of the shape's: whole groups, or part of one."""
    tokens: int = 0
    """Use this many tokens a sequence instead of the shape's."""
    rounds: int = 9
    """Rounds in which every method has its turn."""
    threads: int = 1
    """CPU threads to use."""
    device: str = "cpu"
    """Device to run on: cpu or cuda."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the model's weights."""
