"""The commands of the laboratory as a user meets them, in this process, and runs for them to look at."""

import gc
from importlib import import_module

import pytest
import torch
from transformers.utils import logging as transformers_logging

from oblrpo.cli import run_command
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig
from tests.cli.conftest import called, dense_reward, no_page, oblrpo, small_run

__all__ = ["dense_reward", "no_page", "oblrpo", "small_run"]


class ByFirst:
    """A random policy solves nothing: here the first character decides."""

    def __init__(self, task):
        self.task = task

    def __call__(self, problems, completions):
        G = len(completions) // len(problems)
        parities = [float(ord(text[:1] or " ") % 2) for text in completions]
        rewards_PG = [parities[start : start + G] for start in range(0, len(parities), G)]
        return rewards_PG, [[True] * G for _ in rewards_PG]


@pytest.fixture(scope="module")
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
        return called(lambda: run_command(run), arguments, monkeypatch, capsys)

    yield call
    transformers_logging.enable_progress_bar()


@pytest.fixture
def printed_by(monkeypatch, capsys):
    """Call `python -m lab.benchmarks.NAME ARGUMENTS`; returns what it prints."""

    def call(name, arguments):
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        import_module(f"lab.benchmarks.{name}").main()
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """The folder of a policy of a few thousand parameters."""
    torch.manual_seed(0)
    sizes = PolicyConfig(model_args={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
    folder = tmp_path_factory.mktemp("benchmarks") / "model"
    make_policy(sizes).save(folder)
    return folder
