"""`oblrpo bench`: what our work costs, beside the others'."""

from __future__ import annotations

import gc
import os

import tyro

from oblrpo.research.bench.config import BenchConfig


def run(argv: list[str]) -> None:
    """Run `oblrpo bench`."""
    config = tyro.cli(BenchConfig, args=argv, prog="oblrpo bench")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the memory meter's profiler is talkative
    from transformers.utils import logging as transformers_logging

    from oblrpo.research.bench.tables import print_tables

    transformers_logging.disable_progress_bar()
    gc.freeze()  # the measurements collect garbage in between, which need not go through all that is imported
    print_tables(config)
