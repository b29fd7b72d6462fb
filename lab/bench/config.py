"""Settings of `python -m lab.bench`; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from oblrpo.settings import Positional


@dataclass(frozen=True)
class BenchConfig:
    """Compare ways to have squared score norms and the weighted gradient: time, operations, memory and error.

    Every figure is a ratio to a plain forward and backward in the same run. Examples: `python -m lab.bench scores`;
    `python -m lab.bench scores --shape long --methods "exact (auto)" "exact, Gram"`; `python -m lab.bench scores
    --scaling`; `python -m lab.bench scores --shape qwen3-4b --sequences 2 --tokens 4096 --device cuda --dtype
    bfloat16`; `python -m lab.bench scores --model path/to/model --data texts.jsonl --rounds 3`.
    """

    what: Annotated[Literal["scores"], Positional("[scores]")] = "scores"
    """Which benchmark to run."""
    shape: tuple[str, ...] = ("short", "medium", "long")
    """Shapes to measure: short, medium, long, qwen3-4b."""
    methods: tuple[str, ...] = ()
    """Rows to measure. None: the plain step and ours, without those that are slow or large."""
    all: bool = False
    """Measure every row, the slowest last: one trajectory per backward, the loop, torch.func, Opacus."""
    model: str = ""
    """Folder or hub name: measure this model, on the texts of `data`, instead of random weights and tokens."""
    data: tuple[str, ...] = ()
    """Files of texts, or a data set of the hub (split train), for `model`: the first of the columns text, prompt,
    question. Their tokens, one text after the other with end tokens between, are cut into rows without padding."""
    scaling: bool = False
    """Measure the medium shape with more sequences, tokens or parameters instead."""
    sequences: int = 0
    """Use this many sequences instead of the shape's (of a model: 8): whole groups, or part of one."""
    tokens: int = 0
    """Use this many tokens a sequence instead of the shape's (of a model: 96)."""
    rounds: int = 9
    """Rounds in which every method has its turn."""
    threads: int = 1
    """CPU threads to use."""
    device: str = "cpu"
    """Device to run on: cpu or cuda."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the model's weights."""
