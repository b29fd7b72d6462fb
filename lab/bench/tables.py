"""`python -m lab.bench scores`: prints what `bench.scores` measures, as tables that can be pasted into a page."""

from __future__ import annotations

import platform
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

from lab.bench import real
from lab.bench.config import BenchConfig
from lab.bench.scores import HEAVY, METHODS, SCALING, Row, measure
from lab.bench.workload import SHAPES, Shape, Workload, build
from oblrpo.errors import InputError, did_you_mean
from oblrpo.memory import keep_freed

SCALED = ("exact (auto)",)
"""Methods of the scaling table."""


def print_tables(config: BenchConfig) -> None:
    """Measure what the config asks for and print the tables.

    Raises:
        InputError: an unknown shape or method, a size out of range, a device that is not there, or a model or data that
            cannot be read.
    """
    _check(config)
    torch.set_num_threads(config.threads)
    keep_freed()
    device, dtype = config.device, getattr(torch, config.dtype)
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {where}, {config.threads} thread(s), {config.dtype}, {config.rounds} rounds\n")
    if config.scaling:
        _print_scaling(config.rounds, device, dtype)
    elif config.model:
        sequences, tokens = config.sequences or real.SEQUENCES, config.tokens or real.TOKENS
        workload = real.load(config.model, config.data, sequences, tokens, device, dtype)
        _print_table(config, Path(config.model).name or config.model, workload)
    else:
        for name in config.shape:
            sized = _resized(SHAPES[name], config.sequences, config.tokens)
            _print_table(config, name, build(sized, device, dtype))


def _print_table(config: BenchConfig, name: str, workload: Workload) -> None:
    """Print a row as soon as it is measured, and on stderr what goes on."""
    names = config.methods or [name for name in METHODS if config.all or name not in HEAVY]

    def print_row(row: Row, seconds: float, peak: float) -> None:
        _note("")
        if row.method == "plain":
            print(f"{_describe(name, workload)}: a plain step takes {seconds * 1e3:.0f} ms and {peak / 1e6:.0f} MB\n")
            print("| method | time | 10-90 % of rounds | FLOPs | peak memory | norm error | gradient error |")
            print("|---|---|---|---|---|---|---|")
        print(_line(row), flush=True)

    measure(workload, names, config.rounds, print_row, lambda line: _note(f"{name}: {line}"))
    print()


def _note(line: str) -> None:
    """Show on stderr how far it is: in a terminal over the last line, else a line each."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line and not line.endswith("..."):
        print(line, file=sys.stderr, flush=True)


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
    said = [field.name for field in fields(config) if getattr(config, field.name) != getattr(default, field.name)]
    own = [name for name in said if name in {"shape", "methods", "all", "model", "data", "sequences", "tokens"}]
    if config.scaling and own:
        raise InputError(f"--scaling has its own shapes and methods; leave out --{' and --'.join(own)}.")
    if config.all and config.methods:
        raise InputError("--all measures every method; leave out --methods, or --all.")
    if bool(config.model) != bool(config.data):
        pair = "--model needs --data" if config.model else "--data needs --model"
        raise InputError(f"{pair}: a model is measured on texts, and texts need a model.")
    if config.model and "shape" in said:
        raise InputError("--shape has random weights; leave it out beside --model, and use --sequences and --tokens.")
    for group in [real.GROUP_SIZE] if config.model else [SHAPES[name].group_size for name in config.shape]:
        if config.sequences < 0 or config.sequences % min(group, config.sequences or 1):
            raise InputError(f"{config.sequences} sequences are no whole groups of {group}.")
    try:
        if torch.empty(0, device=config.device).device.type not in {"cpu", "cuda"}:
            raise InputError(f"device {config.device!r} cannot be used: only cpu and cuda can be timed here.")
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {config.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _describe(name: str, workload: Workload) -> str:
    S, T = workload.ids_ST.shape
    return f"{name}: {S} sequences x {T} tokens in groups of {workload.group_size}, {_millions(workload)} M parameters"


def _millions(workload: Workload) -> str:
    return f"{sum(p.numel() for p in workload.parameters) / 1e6:.1f}"


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
            workload = build(shape, device, dtype)
            seconds, _, rows = measure(workload, SCALED, rounds, note=_note)
            _note("")
            cells = [f"{row.time:.2f}, {row.memory:.2f}" for row in rows[1:]]
            size = f"{shape.sequences} x {shape.tokens}, {shape.hidden} | {_millions(workload)} M"
            print(f"| {size} | {seconds * 1e3:.0f} | {' | '.join(cells)} |", flush=True)
