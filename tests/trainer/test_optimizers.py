"""Optimizers by name, and the weights that a schedule-free one hands out."""

import math
import sys

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.settings import OptimConfig
from oblrpo.trainer.optimizers import PACKAGES, averaged, make_optimizer


def descend(name, steps=200, **settings):
    """Minimise |x - 3|^2 from 0."""
    x = torch.nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer(OptimConfig(optimizer=name, **settings), [x])
    for _ in range(steps):
        optimizer.zero_grad()
        (x - 3).square().sum().backward()
        optimizer.step()
    return x, optimizer


@pytest.mark.parametrize(
    ("name", "rate"),
    [("Prodigy", 1.0), ("AdamWScheduleFree", 0.1), ("RAdamScheduleFree", 0.3), ("SGDScheduleFree", 0.1)],
)
def test_each_is_made_and_descends(name, rate):
    assert name in PACKAGES
    x, optimizer = descend(name, learning_rate=rate)
    assert optimizer.param_groups[0]["weight_decay"] == 0
    with averaged(optimizer):
        assert (x - 3).abs().max() < 1


def test_what_is_handed_out_is_the_average_and_what_is_trained_comes_back():
    x, optimizer = descend("SGDScheduleFree", steps=5, learning_rate=0.1)
    trained, iterate = x.detach().clone(), optimizer.state[x]["z"].clone()
    with averaged(optimizer) as other:
        assert other
        average = x.detach().clone()  # y = beta x + (1 - beta) z
    beta = optimizer.param_groups[0]["momentum"]
    torch.testing.assert_close(beta * average + (1 - beta) * iterate, trained)
    torch.testing.assert_close(x.detach(), trained)
    assert not torch.allclose(average, trained)


def test_other_optimizers_hand_out_what_they_train():
    x, optimizer = descend("AdamW", steps=5, learning_rate=0.1)
    before = x.detach().clone()
    with averaged(optimizer) as other:
        assert not other
        assert torch.equal(x, before)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(InputError, match=r"Prodigy needs prodigyopt; .* pip install 'oblrpo\[optimizers\]'"):
        make_optimizer(OptimConfig(optimizer="Prodigy"), [torch.nn.Parameter(torch.zeros(1))])


TORCH = [
    name for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    and name not in {"Optimizer", "LBFGS", "SparseAdam"}
]  # fmt: skip
LARGEST = math.sqrt(torch.finfo(torch.float32).max / 8) * 0.999
"""The largest entry of a gradient of eight equal ones whose squared norm is a float32, as the learner asks for."""


@pytest.mark.parametrize("rate", [1e-6, 1.0])
@pytest.mark.parametrize("name", TORCH)
def test_a_gradient_that_passes_the_check_leaves_weights_finite(name, rate):
    """So that no update has to be taken back: docs/metrics.md, "When an update is skipped"."""
    usual, smallest = [0.01, -0.02] * 5, [1e-45, 0.0, 1e-30, -1e-20] * 3
    for sequence in ([*usual, LARGEST, *usual], [LARGEST, -LARGEST] * 10, smallest, [*smallest, LARGEST, *smallest]):
        weight = torch.nn.Parameter(torch.ones(2, 4))
        optimizer = make_optimizer(OptimConfig(optimizer=name, learning_rate=rate), [weight])
        for value in sequence:
            weight.grad = torch.full((2, 4), value)
            optimizer.step()
        assert weight.isfinite().all()
