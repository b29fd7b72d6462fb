"""The scripts behind docs/results.md still run: each on a policy of a few thousand parameters, with a few outputs."""

import importlib

import pytest
import torch

from oblrpo.config import PolicyConfig
from oblrpo.policy import make_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    sizes = PolicyConfig(hidden_size=16, num_hidden_layers=1, device="cpu")
    folder = tmp_path_factory.mktemp("benchmarks") / "model"
    make_policy(sizes).save(folder)
    return folder


class ByFirst:
    """A random policy solves nothing: here the first character decides."""

    def __init__(self, task):
        self.task = task

    def __call__(self, problems, completions):
        G = len(completions) // len(problems)
        parities = [float(ord(text[:1] or " ") % 2) for text in completions]
        return [parities[start : start + G] for start in range(0, len(parities), G)]


def printed_by(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    importlib.import_module(f"benchmarks.{name}").main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("variance", ["--prompts", 24, "--outputs", 8, "--groups", 4], "| oblr_shrunk | "),
        ("ledger", ["--batches", 3, "--prompts", 3, "--outputs", 2], "| oblr_shrunk | "),
        ("ledger", ["--batches", 3, "--prompts", 3, "--outputs", 2, "--projected"], "| oblr_shrunk | "),
        ("schedule", ["--prompts", 64, "--outputs", 2, "--sizes", 4], "| 4 | "),
    ],
)
def test_statistics_of_one_policy(name, sizes, said, model, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.pool.Rewards", ByFirst)
    monkeypatch.setattr("benchmarks.ledger.Rewards", ByFirst)
    printed = printed_by(name, [model, *sizes], monkeypatch, capsys)
    assert said in printed
    assert not [line for line in printed.splitlines() if " nan" in line]


@pytest.mark.parametrize("name", ["exactness", "learning_rates", "proxies", "splits"])
def test_the_others_can_be_imported(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)
