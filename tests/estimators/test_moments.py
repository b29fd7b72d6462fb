import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import Moments


def test_by_hand():
    """Two prompts with gradients (3, 0) and (1, 2): mean (2, 1), sample covariance trace 2 + 2 = 4."""
    m = estimators.moments(torch.tensor([9.0, 5.0]), 5.0)
    assert m.trace_cov == pytest.approx(4.0)
    assert m.signal2 == pytest.approx(5.0 - 4.0 / 2)
    assert m.snr == pytest.approx(0.75)
    assert m.n_snr == pytest.approx(1.5)
    assert m.critical_batch_size == pytest.approx(4 / 3)


def test_unbiased_by_exact_enumeration():
    """Every pair and triple from a small population of gradients, drawn with replacement."""
    torch.manual_seed(0)
    population = torch.randn(4, 3, dtype=torch.float64)
    signal2 = population.mean(0).square().sum().item()
    trace_cov = population.var(0, unbiased=False).sum().item()
    for n in (2, 3):
        draws = torch.cartesian_prod(*[torch.arange(4)] * n)
        found = [estimators.moments(population[d].square().sum(1), population[d].mean(0).square().sum()) for d in draws]
        assert sum(m.signal2 for m in found) / len(found) == pytest.approx(signal2, rel=1e-12)
        assert sum(m.trace_cov for m in found) / len(found) == pytest.approx(trace_cov, rel=1e-12)


def test_blocks_of_prompts_estimate_the_same_by_exact_enumeration():
    torch.manual_seed(1)
    population = torch.randn(3, 2, dtype=torch.float64)
    draws = torch.cartesian_prod(*[torch.arange(3)] * 4)
    found = []
    for d in draws:
        blocks = population[d].view(2, 2, 2).mean(1)
        found.append(
            estimators.moments(blocks.square().sum(1), population[d].mean(0).square().sum(), prompts_per_group=2)
        )
    assert all(m.n == 4 for m in found)
    expected = population.var(0, unbiased=False).sum().item()
    assert sum(m.trace_cov for m in found) / len(found) == pytest.approx(expected, rel=1e-12)
    expected = population.mean(0).square().sum().item()
    assert sum(m.signal2 for m in found) / len(found) == pytest.approx(expected, rel=1e-12)


def test_edges():
    identical = estimators.moments(torch.tensor([4.0, 4.0]), 4.0)
    assert identical.trace_cov == 0
    assert identical.snr == math.inf
    assert identical.critical_batch_size == 0
    nothing = estimators.moments(torch.zeros(3), 0.0)
    assert math.isnan(nothing.snr)
    opposed = Moments(signal2=-1.0, trace_cov=4.0, n=8)
    assert opposed.snr == 0
    assert opposed.critical_batch_size == math.inf


@pytest.mark.parametrize(
    ("norms", "mean_norm2", "message"),
    [([1.0], 1.0, "at least 2"), ([1.0, float("nan")], 1.0, "NaN"), ([1.0, 1.0], float("inf"), "infinite"),
     ([1.0, -1.0], 0.0, "negative"), ([[1.0, 1.0]], 1.0, "shape")],
)  # fmt: skip
def test_bad_input(norms, mean_norm2, message):
    with pytest.raises(ValueError, match=message):
        estimators.moments(torch.tensor(norms), mean_norm2)


def test_squared_norm_of_gradients():
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    a.grad = torch.tensor([3.0, 4.0])
    assert estimators.squared_norm([a, b]) == 25.0
    assert estimators.squared_norm([b]) == 0.0


def test_one_prompt_with_a_gradient_shows_no_signal():
    """||g||^2 = ||g_1||^2 / N^2, so that the estimate is 0; float32 rounding must not make it a signal."""
    norms = torch.tensor([0.59, 0.0, 0.0, 0.0])
    m = estimators.moments(norms, 0.59 / 16 * (1 + 1e-7))
    assert m.signal2 == 0
    assert m.critical_batch_size == math.inf
