"""`python -m lab.bench`: what our work costs, beside the others'."""

from __future__ import annotations

import gc
import os

from lab.bench.config import BenchConfig
from oblrpo.cli import run_command
from oblrpo.cli.flags import parse


def run(argv: list[str]) -> None:
    """Run `python -m lab.bench`."""
    config = parse(BenchConfig(), argv, "python -m lab.bench")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the memory meter's profiler is talkative
    from transformers.utils import logging as transformers_logging

    from lab.bench.tables import print_tables

    transformers_logging.disable_progress_bar()
    gc.freeze()  # the measurements collect garbage in between, which need not go through all that is imported
    print_tables(config)


if __name__ == "__main__":
    run_command(run)
