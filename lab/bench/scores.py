"""The tables of `python -m lab.bench scores`: every way to score norms and the weighted gradient, in one run."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lab.bench.ours import OURS
from lab.bench.rivals import RIVALS, Rival
from lab.bench.workload import SHAPES, Workload
from oblrpo.memory import peak_bytes

METHODS: Mapping[str, Rival] = {"plain": RIVALS["plain"], **OURS, **RIVALS}

HEAVY = tuple(name for name in RIVALS if name != "plain")
"""Methods that are measured only if asked for: several times slower than the others."""

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
    """Median over rounds of its time (`_seconds`) over the plain step's in the same round."""
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


def measure(
    workload: Workload,
    names: Iterable[str],
    rounds: int,
    each: Callable[[Row, float, float], None] = lambda row, seconds, peak: None,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[float, float, list[Row]]:
    """Time, count and compare the named methods on one workload.

    Methods take turns within a round, so that a drift of the machine's speed hits all; ratios are taken in each round.
    In the first round a method's errors, operations and memory are measured before its time, which warms it up.

    Args:
        workload: model and batch.
        names: rows of `METHODS`; `plain` comes first whether it is named or not.
        rounds: in which every method has its turn; those much slower than the plain step have one.
        each: called with every row as soon as it is known, and the plain step's seconds and peak bytes.
        note: called with a line on what was just measured, or is about to be.

    Returns:
        Seconds and peak bytes of a plain step, and a row a method.
    """
    note(f"the reference for errors: {len(workload.ids_ST)} backwards, {_reference_type(workload)}")
    reference = _reference(workload)
    seconds: dict[str, list[float]] = {name: [] for name in ["plain", *(name for name in names if name != "plain")]}
    counted: dict[str, list[float]] = {}
    errors: dict[str, tuple[float | None, float]] = {}
    rows: list[Row] = []
    for turn in range(1, rounds + 1):
        for name, taken in seconds.items():
            if missing := METHODS[name].missing() or "":
                rows += [Row(name, 0, 0, 0, 0, 0, None, 0, missing)] if turn == rounds else []
            elif turn == 1 or taken[-1] <= TOO_SLOW * seconds["plain"][-1]:
                if turn == 1:
                    note(f"round 1 of {rounds}: {name} ...")
                    errors[name] = _errors(METHODS[name], workload, *reference)  # a model's first tape checks its rows
                    counted[name] = _count(METHODS[name], workload)
                taken.append(_time(METHODS[name], workload))
                ratio = taken[-1] / seconds["plain"][len(taken) - 1]
                note(f"round {turn} of {rounds}: {name} took {taken[-1]:.3g} s, {ratio:.2f} times a plain step")
            if turn == rounds:
                if not missing:
                    rows.append(_row(name, taken, seconds["plain"], counted[name], counted["plain"], errors[name]))
                each(rows[-1], statistics.median(seconds["plain"]), counted["plain"][1])
    return statistics.median(seconds["plain"]), counted["plain"][1], rows


def _row(
    name: str, taken: list[float], plain: list[float], counted: list[float], of_plain: list[float],
    errors: tuple[float | None, float],
) -> Row:  # fmt: skip
    ratios = sorted(t / p for t, p in zip(taken, plain, strict=False))  # the slow have only one
    tenth = len(ratios) // 10
    return Row(
        name, statistics.median(ratios), ratios[tenth], ratios[-1 - tenth], counted[0] / of_plain[0],
        counted[1] / of_plain[1], *errors,
    )  # fmt: skip


def _fresh(workload: Workload) -> None:
    workload.model.zero_grad(set_to_none=True)
    gc.collect()


def _time(method: Rival, workload: Workload) -> float:
    _fresh(workload)
    with method.prepared(workload) as run:
        _wait(workload)
        start = _seconds(workload)
        run()
        _wait(workload)
        return _seconds(workload) - start


def _seconds(workload: Workload) -> float:
    """CPU seconds of this process, which others on the machine hardly lengthen; on a GPU or in several threads time."""
    alone = torch.get_num_threads() == 1 and not workload.ids_ST.is_cuda
    return time.process_time() if alone else time.perf_counter()


def _wait(workload: Workload) -> None:
    if workload.ids_ST.is_cuda:
        torch.cuda.synchronize()


def _count(method: Rival, workload: Workload) -> list[float]:
    """Operations and peak bytes of one run."""
    _fresh(workload)
    with method.prepared(workload) as run:
        peak = peak_bytes(run, workload.ids_ST.device)
    if workload.ids_ST.is_cuda:  # torch's counter fails at attention with fewer keys than queries (2.11)
        return [math.nan, float(peak)]
    _fresh(workload)
    with method.prepared(workload) as run, FlopCounterMode(display=False) as flops:
        run()
    return [float(flops.get_total_flops()), float(peak)]


def _gradient(workload: Workload) -> list[Tensor]:
    return [p.grad.detach() for p in workload.parameters if p.grad is not None]


def _reference_type(workload: Workload) -> str:
    wide = sum(p.numel() for p in workload.parameters) <= REFERENCE_IN_FLOAT64
    return "in float64" if wide else "in the model's own type, for it is large"


def _reference(workload: Workload) -> tuple[Tensor, list[Tensor]]:
    """Norms and gradient, one sequence at a time by autograd, in float64 if that fits.

    No score is held whole: each parameter's share is added up as soon as the backward has made it.
    """
    if sum(p.numel() for p in workload.parameters) <= REFERENCE_IN_FLOAT64:
        workload = replace(workload, model=copy.deepcopy(workload.model).double())
    total = [torch.zeros_like(p) for p in workload.parameters]
    norm2_S = torch.zeros(len(workload.ids_ST), dtype=torch.float64, device=workload.ids_ST.device)
    coef = workload.coef_S.tolist()
    now = 0

    def add_to(sum_of_one: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            norm2_S[now] += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
            sum_of_one.add_(parameter.grad, alpha=coef[now])
            parameter.grad = None

        return add

    _fresh(workload)
    hooks = [
        p.register_post_accumulate_grad_hook(add_to(one)) for p, one in zip(workload.parameters, total, strict=True)
    ]
    for now in range(len(norm2_S)):  # which the hooks read
        workload.logps_of(slice(now, now + 1)).sum().backward()
    for hook in hooks:
        hook.remove()
    return norm2_S, total


def _errors(method: Rival, workload: Workload, norm2_S: Tensor, gradient: list[Tensor]) -> tuple[float | None, float]:
    _fresh(workload)
    ours_S = method(workload)
    pairs = zip(_gradient(workload), gradient, strict=True)
    difference = torch.stack([(ours.double() - reference).norm() for ours, reference in pairs]).norm()
    size = torch.stack([reference.double().norm() for reference in gradient]).norm()
    norm_error = None if ours_S is None else float(((ours_S.double() - norm2_S) / norm2_S).abs().max())
    _fresh(workload)
    return norm_error, float(difference / size)
