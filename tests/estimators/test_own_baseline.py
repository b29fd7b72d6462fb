"""A baseline of the user's own: from Python, and by `file.py:function`."""

import pytest
import torch

from oblrpo import algorithms
from oblrpo.algorithms import resolve
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, baseline, baseline_inputs, register_baseline, under_every_baseline
from oblrpo.estimators.baselines import FUNCTIONS
from oblrpo.settings import AlgorithmConfig, OptimConfig

REWARDS_PG = torch.tensor([[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]])
MINE = """
def others(rewards_PG, valid_PG):
    total = (rewards_PG * valid_PG).sum(1, keepdim=True)
    return (total - rewards_PG) / (valid_PG.sum(1, keepdim=True) - 1).clamp(min=1)

def weighted(rewards_PG, valid_PG, norm2_PG):
    return ((rewards_PG * norm2_PG).sum(1, keepdim=True) / norm2_PG.sum(1, keepdim=True)).expand_as(rewards_PG)
"""


@pytest.fixture(autouse=True)
def tables():
    """What a test adds to them goes with it."""
    saved = [(table, dict(table)) for table in (BASELINES, FUNCTIONS, algorithms._registered)]
    yield
    for table, before in saved:
        table.clear()
        table.update(before)


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def named(path):
    return resolve(AlgorithmConfig(algorithm="grpo", baseline=path), OptimConfig()).baseline


def test_by_its_file(mine):
    """It is known from then on, ledger included, and whether it is unbiased was tried."""
    own, biased = named(f"{mine}:others"), named(f"{mine}:weighted")
    torch.testing.assert_close(baseline(own, REWARDS_PG), baseline("rloo", REWARDS_PG))
    assert (BASELINES[own].unbiased, BASELINES[biased].unbiased) == (True, False)
    inputs = baseline_inputs(torch.ones(2, 3, 4), norm2_PG=torch.rand(2, 3))
    under = under_every_baseline(REWARDS_PG, inputs)
    torch.testing.assert_close(under[own], under["rloo"])
    torch.testing.assert_close(under[biased], under["eob"])
    mine.write_text(MINE.replace("(total - rewards_PG)", "0 * (total - rewards_PG)"))
    torch.testing.assert_close(baseline(named(own), REWARDS_PG), torch.zeros(2, 3))  # the file as it is now


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda rewards, mask: rewards, "parameters must be rewards_PG, valid_PG"),
        (lambda rewards_PG, valid_PG, prior: rewards_PG, "parameters must be"),
        (lambda rewards_PG, valid_PG: rewards_PG.mean(), r"a tensor of shape \(3, 4\)"),
        (lambda rewards_PG, valid_PG: rewards_PG / 0, "finite"),
        (lambda rewards_PG, valid_PG: 1 / 0, "fails on random rewards: ZeroDivisionError"),
    ],
)
def test_what_is_no_baseline(function, why):
    with pytest.raises(ValueError, match=why):
        register_baseline("mine", function)
    assert "mine" not in BASELINES
    assert "mine" not in FUNCTIONS


def test_a_path_of_nothing_is_one_sentence(mine):
    for path, why in (
        (f"{mine}:other", "has no function 'other'; write .*:others"),
        ("missing.py:f", "baseline file missing.py does not exist"),
        ("mine", "unknown baseline 'mine'; .*file.py:function"),
    ):
        with pytest.raises(InputError, match=why):
            named(path)
