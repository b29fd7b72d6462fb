"""`oblrpo evaluate`: completions of benchmarks, graded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console


@dataclass(frozen=True)
class EvaluateCommand:
    """Grade a file of completions of a mathematical benchmark: avg@k, pass@k and maj@k with 95 % intervals.

    Example: `oblrpo evaluate --completions out.jsonl --benchmark math500 --data math500.jsonl --json`.
    """

    completions: str
    """JSONL file with rows {"index": row of the data, from 0, "completion": text}; equally many of every problem."""
    benchmark: str
    """gsm8k, math500, aime24, aime25, amc23, olympiadbench or minerva_math."""
    data: tuple[str, ...] = ()
    """The benchmark as published, JSONL; several files are read one after the other. None: from the hub."""
    k: tuple[int, ...] = ()
    """Sizes for pass@k and maj@k. None: 1, 2, 4, ... and all completions of a problem."""
    json: bool = False
    """Print one JSON object instead of a table."""
    processes: int = 1
    """Worker processes that compare formulas."""
    seconds: float = 5.0
    """Longest time for one comparison; after it the answer counts as wrong, and as a timeout."""


def run(argv: list[str]) -> None:
    """`oblrpo evaluate`."""
    command = tyro.cli(EvaluateCommand, args=argv, prog="oblrpo evaluate")
    from oblrpo.evaluate.completions import evaluate_completions, read_completions, table
    from oblrpo.tasks.benchmarks import load_benchmark
    from oblrpo.tasks.grading import MathVerifier

    problems = load_benchmark(command.benchmark, command.data)
    completions = read_completions(Path(command.completions), len(problems))
    with MathVerifier(command.processes, command.seconds) as verifier:
        result = evaluate_completions(command.benchmark, problems, completions, verifier, command.k)
    if command.json:
        print(json.dumps(result))
    else:
        Console(markup=False).print(table(result))
