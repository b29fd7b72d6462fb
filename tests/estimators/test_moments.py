"""Signal and noise from squared norms, and the metric of optimizers that divide by past gradients."""

import itertools
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import Moments, Prior, baseline
from tests.estimators.bandits import bandit
from tests.estimators.test_unbiased import remembering


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


@pytest.mark.parametrize(("seed", "first", "later"), [(0, 1.19, 1.01), (1, 1.24, 0.97), (2, 1.45, 1.10)])
def test_the_signal_under_a_prior_of_the_batch_itself_is_too_high_and_hardly_so_later(seed, first, later):
    """As docs/baselines.md says, by listing every batch of two prompts; the plain baseline has no such error."""
    policy = bandit(2, 3, seed=seed)
    mean_PD = ((policy.probability_PA * policy.reward_PA)[..., None] * policy.score_PATD.sum(2)).sum(1)
    true = float(mean_PD[0] @ mean_PD[1])
    wanted = {"oblr": (None, 1), "oblr_shrunk": (Prior(8.0), first), "of later": (remembering(8.0), later)}
    for name, (prior, ratio) in wanted.items():
        found = 0.0
        for index_PG, probability in policy.batches(2):
            rewards_PG, inputs = policy.outputs(index_PG)
            b_PG = baseline("oblr" if name == "oblr" else "oblr_shrunk", rewards_PG, prior=prior, **inputs)
            score_PGD = policy.score_PATD.sum(2)[torch.arange(2)[:, None], index_PG]
            group_PD = ((rewards_PG - b_PG)[..., None] * score_PGD).mean(1)
            moments = estimators.moments(group_PD.square().sum(1), group_PD.mean(0).square().sum())
            found += float(probability) * moments.signal2
        assert found / true == pytest.approx(ratio, abs=1e-5 if name == "oblr" else 6e-3)


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
    assert nothing.snr == 0
    assert not nothing.has_gradient
    assert nothing.critical_batch_size == math.inf
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


def test_norms_of_prompts_from_inner_products():
    torch.manual_seed(0)
    score_PGN, coef_PG = torch.randn(3, 4, 7, dtype=torch.float64), torch.randn(3, 4)
    coef_PG[1, 2:] = 0  # outputs that do not count
    expected_P = (coef_PG[..., None] * score_PGN).sum(1).square().sum(1)
    assert torch.allclose(estimators.group_norm2(score_PGN @ score_PGN.mT, coef_PG), expected_P)
    with pytest.raises(ValueError, match="do not fit"):
        estimators.group_norm2(score_PGN @ score_PGN.mT, coef_PG[:, :2])


def test_estimated_norms_may_be_negative_by_chance_and_their_mean_counts():
    exact = estimators.moments(torch.tensor([2.0, 2.0, 2.0]), 1.0)
    assert estimators.moments(torch.tensor([5.0, -1.0, 2.0]), 1.0, estimated=True) == exact
    with pytest.raises(ValueError, match="negative"):
        estimators.moments(torch.tensor([5.0, -1.0, 2.0]), 1.0)


def test_kappa_compares_the_better_rewarded_with_the_others():
    norm2 = torch.tensor([1.0, 3.0, 6.0, 2.0])
    assert estimators.kappa(norm2, torch.tensor([0.0, 1.0, 1.0, 0.0])) == pytest.approx(4.5 / 1.5)
    assert math.isnan(estimators.kappa(norm2, torch.ones(4)))
    assert estimators.kappa(norm2, torch.tensor([0.5, 0.0, 1.0, 0.0])) == 6.0 / 2.0  # halfway is not above it


def test_one_prompt_with_a_gradient_shows_no_signal():
    """||g||^2 = ||g_1||^2 / N^2, so that the estimate is 0; float32 rounding must not make it a signal."""
    norms = torch.tensor([0.59, 0.0, 0.0, 0.0])
    m = estimators.moments(norms, 0.59 / 16 * (1 + 1e-7))
    assert m.signal2 == 0
    assert m.critical_batch_size == math.inf


@pytest.mark.parametrize(("signal2", "found"), [(0.5e-6, 0.0), (2e-6, 2e-6), (-0.5e-6, 0.0), (-2e-6, -2e-6)])
def test_a_signal_below_a_millionth_of_the_norms_of_prompts_is_none(signal2, found):
    """Not of that of their mean, which is a thousandth of it here: N ||g||^2 = 1 + (N - 1) S."""
    m = estimators.moments(torch.ones(1000), (1 + 999 * signal2) / 1000)
    assert m.signal2 == pytest.approx(found, rel=1e-6, abs=0)


def test_squared_norm():
    """Sum_i g_i^2, in float64."""
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 2))
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    assert estimators.squared_norm([a, b]) == pytest.approx(25 + 6)
    b.grad = None
    assert estimators.squared_norm([a, b]) == pytest.approx(25)
    a.grad = torch.full((2,), 1e25)
    assert estimators.squared_norm([a]) == pytest.approx(2e50)  # more than float32 holds


@pytest.mark.parametrize("halves", [(1, 1), (2, 1), (2, 2)])
def test_halves_are_unbiased_by_exact_enumeration(halves):
    """Every batch from a small population of gradients, drawn with replacement; the noise is that of one gradient."""
    torch.manual_seed(2)
    gradients = torch.randn(3, 4, dtype=torch.float64) + 0.3
    mean, n = gradients.mean(0), sum(halves)
    found = []
    for index in itertools.product(range(3), repeat=n):
        drawn = gradients[list(index)] / n
        first, second = drawn[: halves[0]].sum(0), drawn[halves[0] :].sum(0)
        found.append(
            estimators.moments_of_halves(float(first @ second), float((first + second).square().sum()), halves)
        )
    signal2, trace_cov = (sum(getattr(m, name) for m in found) / len(found) for name in ("signal2", "trace_cov"))
    assert signal2 == pytest.approx(float(mean.square().sum()), rel=1e-12)
    assert trace_cov == pytest.approx(float((gradients - mean).square().sum(1).mean()), rel=1e-12)
    assert {m.n for m in found} == {n}
    if halves[0] == halves[1]:
        assert min(m.trace_cov for m in found) >= -1e-12


def test_halves_of_two_prompts_are_all_pairs():
    gradients = torch.tensor([[3.0, 0.0], [1.0, 2.0]])
    mean = gradients.mean(0)
    halves = estimators.moments_of_halves(float(gradients[0] @ gradients[1]) / 4, float(mean @ mean), (1, 1))
    pairs = estimators.moments(gradients.square().sum(1), float(mean @ mean))
    assert halves.signal2 == pytest.approx(pairs.signal2)
    assert halves.trace_cov == pytest.approx(pairs.trace_cov)


@pytest.mark.parametrize(
    "given", [(0.0, 1.0, (2, 0)), (math.nan, 1.0, (1, 1)), (0.0, math.inf, (1, 1)), (0.0, -1.0, (1, 1))]
)
def test_what_are_no_halves_is_refused(given):
    with pytest.raises(ValueError, match="give no moments"):
        estimators.moments_of_halves(*given)
