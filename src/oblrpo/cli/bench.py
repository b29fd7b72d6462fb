"""`oblrpo bench`: what our work costs, beside the others'."""

from __future__ import annotations

import os

import tyro

from oblrpo.research.bench.config import BenchConfig


def run(argv: list[str]) -> None:
    """Run `oblrpo bench`."""
    config = tyro.cli(BenchConfig, args=argv, prog="oblrpo bench")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the memory meter's profiler is talkative
    from oblrpo.research.bench.tables import print_tables

    print_tables(config)
