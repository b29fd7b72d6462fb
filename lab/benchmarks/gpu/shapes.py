"""`bench scores` at Qwen3-4B's shape with random weights: what norms cost beside a plain step."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace

import torch

from lab.bench.scores import Row, measure
from lab.bench.workload import SHAPES, Shape, build
from lab.benchmarks.gpu.page import Page

FIRST = ("exact (auto)", "exact, instantiate")
THEN = ("calibrated proxy, no norms", "one trajectory per backward", "exact, Gram")
SMALL = replace(
    SHAPES["short"], sequences=4, tokens=8, group_size=2, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=1,
    head_dim=8, vocabulary=40,
)  # fmt: skip
SIZES = [(8, 512), (4, 4096)]
"""Sequences at most, and tokens of each."""
ROUNDS = 3


def run(page: Page, device: str, small: bool) -> None:
    """Short sequences, then long ones; the methods that matter first, in the order of the lists."""
    page.table(
        f"{'A tiny' if small else 'Qwen3-4B'} shape, random weights, bfloat16, in groups of S; medians of {ROUNDS} "
        "rounds over a plain forward and backward in the same round. Errors are those against one sequence at a time "
        "in bfloat16, which is off itself.",
        "S x T", "method", "plain step (s)", "plain peak (GB)", "time", "memory", "FLOPs", "norm error",
        "gradient error",
    )  # fmt: skip
    sizes = [(4, 8)] if small else SIZES
    shape = SMALL if small else SHAPES["qwen3-4b"]
    fits: dict[int, int] = {}
    _expected.clear()
    for names in (FIRST, THEN):
        for sequences, tokens in sizes:
            for name in names[:1] if small else names:
                S = fits.get(tokens, sequences)
                while S and not _line(page, replace(shape, sequences=S, tokens=tokens, group_size=S), name, device):
                    S = 0 if tokens in fits else S // 2  # the first method says how many sequences fit
                if S:
                    fits.setdefault(tokens, S)


def _line(page: Page, shape: Shape, name: str, device: str) -> bool:
    """Measure one method; False: the memory was not enough."""
    where = f"{shape.sequences} x {shape.tokens}"
    if not page.has_time(_expected.get(shape.tokens, 0.0)):
        page.say(f"{name} at {where} was skipped: there was no time left for it.")
        return True
    began = time.monotonic()
    found: Row | None = None
    try:
        seconds, peak, rows = measure(build(shape, device, torch.bfloat16), [name], ROUNDS)
        found = rows[-1]
    except torch.OutOfMemoryError:
        page.add(where, name, "out of memory", *[""] * 6)
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    if found is None:
        return False
    _expected[shape.tokens] = time.monotonic() - began
    norm = "" if found.norm_error is None else f"{found.norm_error:.1e}"
    flops = "" if math.isnan(found.flops) else f"{found.flops:.2f}"
    cells = [f"{seconds:.3f}", f"{peak / 1e9:.1f}", f"{found.time:.2f}", f"{found.memory:.2f}", flops]
    page.add(where, name, *cells, norm, f"{found.gradient_error:.1e}")
    return True


_expected: dict[int, float] = {}
"""Seconds that the last method took, by the length of sequences."""
