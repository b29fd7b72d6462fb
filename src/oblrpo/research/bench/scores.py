"""The tables of `oblrpo bench scores`: every way to score norms and the weighted gradient, in one run."""

from __future__ import annotations

import copy
import ctypes
import gc
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from oblrpo.memory import peak_bytes
from oblrpo.research.bench.ours import OURS
from oblrpo.research.bench.rivals import RIVALS, Rival, one_trajectory_per_backward
from oblrpo.research.bench.workload import SHAPES, Shape, Workload, build

METHODS: Mapping[str, Rival] = {"plain": RIVALS["plain"], **OURS, **RIVALS}

REFERENCE_IN_FLOAT64 = 200_000_000
"""Largest model whose reference is computed in float64; that of larger ones has the model's own type."""

TOO_SLOW = 8.0
"""A method this many times slower than the plain step is timed once."""

SCALING = {
    "S": [replace(SHAPES["medium"], name=f"S={s}", sequences=s) for s in (8, 16, 32)],
    "T": [replace(SHAPES["medium"], name=f"T={t}", tokens=t) for t in (32, 128, 512)],
    "parameters": [
        replace(SHAPES["medium"], name=f"width {d}", hidden=d, intermediate=d * 10 // 3 // 2 * 2, heads=d // 48,
                kv_heads=d // 96, head_dim=48)
        for d in (192, 384, 768)
    ],
}  # fmt: skip
"""The medium shape with one size changed at a time."""


@dataclass(frozen=True)
class Row:
    """What was measured of one method at one shape."""

    method: str
    time: float
    """Median over rounds of its time over the plain step's in the same round."""
    low: float
    high: float
    """The same ratio's 10th and 90th percentile over rounds."""
    flops: float
    """Floating-point operations of its matrix products over the plain step's."""
    memory: float
    """Peak bytes of tensors over the plain step's."""
    norm_error: float | None
    """Largest relative error of a squared norm."""
    gradient_error: float
    """Relative error of the weighted gradient."""
    missing: str = ""
    """Reason why the method could not run, or empty."""


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: page faults of fresh memory otherwise take up to a fifth of a step, unevenly."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, its largest value
    except (OSError, AttributeError):
        pass  # not glibc: nothing to set


def measure(
    shape: Shape, names: Iterable[str], rounds: int, device: str, dtype: torch.dtype, progress: bool = False
) -> tuple[float, float, list[Row]]:
    """Time, count and compare the named methods at one shape.

    Methods take turns within a round, so that a drift of the machine's speed hits all; ratios are taken in each round.

    Returns:
        Seconds and peak bytes of a plain step, and a row a method.
    """
    workload = build(shape, device, dtype)
    norm2_S, gradient = _reference(shape, device, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in ["plain", *(name for name in names if name != "plain")]}
    missing = {name: METHODS[name].missing() or "" for name in seconds}
    for turn in range(rounds + 1):
        for name, taken in seconds.items():
            slow = turn > 1 and taken[-1] > TOO_SLOW * seconds["plain"][-1]
            if missing[name] or slow:
                continue
            if progress:
                print(f"\r\033[K{shape.name}: round {turn} of {rounds}, {name}", end="", flush=True)
            taken.append(_time(METHODS[name], workload))
    plain = [0.0, 0.0]
    rows = []
    for name, taken in seconds.items():
        if missing[name]:
            rows.append(Row(name, 0, 0, 0, 0, 0, None, 0, missing[name]))
            continue
        # The first round warms up; the slow have only two.
        ratios = sorted(t / p for t, p in list(zip(taken, seconds["plain"], strict=False))[1:])
        counted = _count(METHODS[name], workload)
        plain = counted if name == "plain" else plain
        norm_error, gradient_error = _errors(METHODS[name], workload, norm2_S, gradient)
        tenth = len(ratios) // 10
        rows.append(
            Row(
                name, statistics.median(ratios), ratios[tenth], ratios[-1 - tenth],
                counted[0] / plain[0], counted[1] / plain[1], norm_error, gradient_error,
            )
        )  # fmt: skip
    if progress:
        print("\r\033[K", end="")
    return statistics.median(seconds["plain"][1:]), plain[1], rows


def _fresh(workload: Workload) -> None:
    workload.model.zero_grad(set_to_none=True)
    gc.collect()


def _time(method: Rival, workload: Workload) -> float:
    _fresh(workload)
    with method.prepared(workload) as run:
        _wait(workload)
        start = time.perf_counter()
        run()
        _wait(workload)
        return time.perf_counter() - start


def _wait(workload: Workload) -> None:
    if workload.ids_ST.is_cuda:
        torch.cuda.synchronize()


def _count(method: Rival, workload: Workload) -> list[float]:
    """Operations and peak bytes of one run."""
    _fresh(workload)
    with method.prepared(workload) as run:
        peak = peak_bytes(run, workload.ids_ST.device)
    _fresh(workload)
    with method.prepared(workload) as run, FlopCounterMode(display=False) as flops:
        run()
    return [float(flops.get_total_flops()), float(peak)]


def _gradient(workload: Workload) -> list[Tensor]:
    return [p.grad.detach() for p in workload.parameters if p.grad is not None]


def _reference(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Norms and gradient, one sequence at a time by autograd, in float64 if that fits."""
    workload = build(shape, device, dtype)
    if sum(p.numel() for p in workload.parameters) <= REFERENCE_IN_FLOAT64:
        workload = replace(workload, model=copy.deepcopy(workload.model).double())
    norm2_S = one_trajectory_per_backward(workload)
    return norm2_S.double(), _gradient(workload)


def _errors(method: Rival, workload: Workload, norm2_S: Tensor, gradient: list[Tensor]) -> tuple[float | None, float]:
    _fresh(workload)
    ours_S = method(workload)
    pairs = zip(_gradient(workload), gradient, strict=True)
    difference = torch.stack([(ours.double() - reference).norm() for ours, reference in pairs]).norm()
    size = torch.stack([reference.double().norm() for reference in gradient]).norm()
    norm_error = None if ours_S is None else float(((ours_S.double() - norm2_S) / norm2_S).abs().max())
    _fresh(workload)
    return norm_error, float(difference / size)
