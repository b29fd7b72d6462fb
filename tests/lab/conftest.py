"""The commands of the laboratory as a user meets them, in this process, and runs for them to look at."""

import gc
from importlib import import_module

import pytest
from transformers.utils import logging as transformers_logging

from oblrpo.cli import carry_out
from tests.cli.conftest import called, dense_reward, no_page, oblrpo, small_run

__all__ = ["dense_reward", "no_page", "oblrpo", "small_run"]


@pytest.fixture
def frozen():
    """What is imported is no garbage, as in `python -m lab.bench`: the bench collects before every measurement."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def lab(monkeypatch, capsys):
    """Call `python -m lab.NAME ARGUMENTS`; returns (exit code, stdout, stderr)."""

    def call(name, *arguments):
        run = import_module(f"lab.{name}.__main__").run
        return called(lambda: carry_out(run), arguments, monkeypatch, capsys)

    yield call
    transformers_logging.enable_progress_bar()
