"""`oblrpo bench scores`: prints what `bench.scores` measures, as tables that can be pasted into a page."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace

import torch

from oblrpo.errors import InputError, did_you_mean
from oblrpo.research.bench.config import BenchConfig
from oblrpo.research.bench.scores import METHODS, SCALING, Row, keep_freed_memory, measure
from oblrpo.research.bench.workload import SHAPES, Shape

SCALED = ("exact (auto)", "exact, gradients kept", "exact, folds", "projected")
"""Methods of the scaling table."""


def print_tables(config: BenchConfig) -> None:
    """Measure what the config asks for and print the tables.

    Raises:
        InputError: an unknown shape or method, a size out of range, or a device that is not there.
    """
    _check(config)
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    device, dtype = config.device, getattr(torch, config.dtype)
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {where}, {config.threads} thread(s), {config.dtype}, {config.rounds} rounds\n")
    if config.scaling:
        _print_scaling(config.rounds, device, dtype)
        return
    for name in config.shape:
        sized = _resized(SHAPES[name], config.sequences, config.tokens)
        names = config.methods or METHODS
        seconds, peak, rows = measure(sized, names, config.rounds, device, dtype, sys.stdout.isatty())
        print(f"{_describe(sized)}: a plain step takes {seconds * 1e3:.0f} ms and {peak / 1e6:.0f} MB\n")
        print("| method | time | 10-90 % of rounds | FLOPs | peak memory | norm error | gradient error |")
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            print(_line(row), flush=True)
        print()


def _resized(shape: Shape, sequences: int, tokens: int) -> Shape:
    """With as many sequences and tokens as asked for; fewer sequences than a group are one group."""
    sequences = sequences or shape.sequences
    return replace(
        shape, sequences=sequences, group_size=min(shape.group_size, sequences), tokens=tokens or shape.tokens
    )


def _check(config: BenchConfig) -> None:
    for given, table in ((config.shape, SHAPES), (config.methods, METHODS)):
        for name in given:
            if name not in table:
                raise InputError(f"unknown {name!r}; choose from: {', '.join(table)}.{did_you_mean(name, list(table))}")
    if config.rounds < 1 or config.threads < 1:
        raise InputError("--rounds and --threads must be at least 1.")
    if config.tokens < 0 or config.tokens == 1:
        raise InputError(f"--tokens must be at least 2, or 0 for the shape's own, not {config.tokens}.")
    default = BenchConfig()
    own = [
        name for name in ("shape", "methods", "sequences", "tokens") if getattr(config, name) != getattr(default, name)
    ]
    if config.scaling and own:
        raise InputError(f"--scaling has its own shapes and methods; leave out --{' and --'.join(own)}.")
    for name in config.shape:
        group = SHAPES[name].group_size
        if config.sequences < 0 or config.sequences % min(group, config.sequences or 1):
            raise InputError(f"{config.sequences} sequences are no whole groups of {group}.")
    try:
        if torch.empty(0, device=config.device).device.type not in {"cpu", "cuda"}:
            raise InputError(f"device {config.device!r} cannot be used: only cpu and cuda can be timed here.")
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {config.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _describe(shape: Shape) -> str:
    return (
        f"{shape.name}: {shape.sequences} sequences x {shape.tokens} tokens in groups of {shape.group_size}, "
        f"{_parameters(shape) / 1e6:.1f} M parameters"
    )


def _parameters(shape: Shape) -> int:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * query + 2 * key) + 2 * shape.head_dim
    block = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * block + shape.hidden * (1 + shape.vocabulary * (1 if shape.tied else 2))


def _line(row: Row) -> str:
    if row.missing:
        return f"| {row.method} | {row.missing} | | | | | |"
    norm = "none" if row.norm_error is None else f"{row.norm_error:.1e}"
    norm = "" if row.method == "plain" else norm
    return (
        f"| {row.method} | {row.time:.2f} | {row.low:.2f} - {row.high:.2f} | {row.flops:.2f} | {row.memory:.2f} "
        f"| {norm} | {row.gradient_error:.1e} |"
    )


def _print_scaling(rounds: int, device: str, dtype: torch.dtype) -> None:
    titles = [f"{name}: time, memory" for name in SCALED]
    print(f"| sequences x tokens, width | parameters | plain (ms) | {' | '.join(titles)} |")
    print("|---" * (3 + len(SCALED)) + "|")
    for shapes in SCALING.values():
        for shape in shapes:
            seconds, _, rows = measure(shape, SCALED, rounds, device, dtype, sys.stdout.isatty())
            cells = [f"{row.time:.2f}, {row.memory:.2f}" for row in rows[1:]]
            size = f"{shape.sequences} x {shape.tokens}, {shape.hidden} | {_parameters(shape) / 1e6:.1f} M"
            print(f"| {size} | {seconds * 1e3:.0f} | {' | '.join(cells)} |", flush=True)
