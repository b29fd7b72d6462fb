"""Batches that hold a good part of all prompts: the finite population's correction, by listing every batch."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import Moments
from tests.estimators.bandits import bandit

NAMES = ("none", "rloo", "oblr", "oblr_shrunk")
"""The unbiased baselines, the last with a prior of earlier steps alone."""


@dataclass
class Prompt:
    """Means over every group of G outputs of a prompt."""

    gradient_D: torch.Tensor
    norm2: float
    own2: float

    @classmethod
    def of(cls, policy, q, G, name):
        prior = estimators.Prior(past_only=True)
        prior.observe(torch.tensor([[0.3, 0.9]]), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2).bool())
        prior.next_step()
        score_AD, total = policy.score_PATD[q].sum(1), [torch.zeros_like(policy.score_PATD[0, 0, 0]), 0.0, 0.0]
        for draw in itertools.product(range(policy.reward_PA.shape[1]), repeat=G):
            score_GD, rewards_PG = score_AD[list(draw)], policy.reward_PA[q, list(draw)][None]
            norm2_PG, chance = score_GD.square().sum(1)[None], float(policy.probability_PA[q, list(draw)].prod())
            b = estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG, prior=prior)
            gradient_D = ((rewards_PG - b)[0, :, None] * score_GD).mean(0)
            own2 = estimators.own_norm2((score_GD @ score_GD.T)[None], rewards_PG, torch.ones_like(rewards_PG))
            for place, value in enumerate((gradient_D, float(gradient_D.square().sum()), own2)):
                total[place] += chance * value
        return cls(*total)


@dataclass
class Batches:
    """Means over every batch of n of the prompts, none twice; moments are linear in what they are made of."""

    n: int
    variance: float
    """Of the batch gradient."""
    plain: Moments
    corrected: Moments

    @classmethod
    def of(cls, prompts, n):
        M, chosen = len(prompts), list(itertools.combinations(prompts, n))
        mean_D, mean2, moments = torch.stack([p.gradient_D for p in prompts]).mean(0), 0.0, []
        for batch in chosen:
            norm2_P, gradient_PD = torch.tensor([p.norm2 for p in batch]), torch.stack([p.gradient_D for p in batch])
            apart = gradient_PD.sum(0).square().sum() - gradient_PD.square().sum()  # given prompts, independent
            norm2 = float(norm2_P.sum() + apart) / n**2
            plain, own2 = estimators.moments(norm2_P, norm2), sum(p.own2 for p in batch) / n
            moments.append((plain, plain.of_rows(own2, M)))
            mean2 += norm2 / len(chosen)
        means = (
            Moments(*(sum(getattr(m, name) for m in each) / len(each) for name in ("signal2", "trace_cov")), n,
                    sum(m.spared for m in each) / len(each))
            for each in zip(*moments, strict=True)
        )  # fmt: skip
        return cls(n, mean2 - float(mean_D.square().sum()), *means)


def found(M, sizes, G, name):
    policy = bandit(M, 2, seed=3)
    mu_MD = ((policy.probability_PA * policy.reward_PA)[..., None] * policy.score_PATD.sum(2)).sum(1).detach()
    prompts = [Prompt.of(policy, q, G, name) for q in range(M)]
    return mu_MD, prompts, {n: Batches.of(prompts, n) for n in sizes}


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("M", "sizes", "G"), [(4, (2, 3, 4), 2), (4, (2, 4), 3), (4, (2, 4), 4), (8, (2, 8), 5)])
def test_signal_and_noise_are_unbiased(M, sizes, G, name):
    """N SNR is then the ratio of means, whatever part of all prompts a batch holds."""
    mu_MD, prompts, batches = found(M, sizes, G, name)
    signal2, spread = float(mu_MD.mean(0).square().sum()), float((mu_MD - mu_MD.mean(0)).square().sum(1).mean())
    for prompt, mu_D in zip(prompts, mu_MD, strict=True):
        torch.testing.assert_close(prompt.gradient_D, mu_D, rtol=0, atol=1e-12)
        assert prompt.own2 == pytest.approx(float(mu_D.square().sum()), abs=1e-12)
    for n, each in batches.items():
        assert each.corrected.signal2 == pytest.approx(signal2, abs=1e-12)
        assert each.corrected.trace_cov / n == pytest.approx(each.variance, abs=1e-12)
        assert each.corrected.spared == pytest.approx(spread / (M - 1), abs=1e-12)
        assert each.plain.trace_cov / n > 1.05 * each.variance  # or nothing of this would matter
        assert each.plain.signal2 < 0.95 * signal2


@pytest.mark.parametrize("G", [2, 3, 4, 8])
def test_pairs_of_a_prompts_own_advantages_are_too_long_by_what_they_see_of_each_other(G):
    """G / (G - 1) (||g||^2 - sum_j ||x_j||^2) of RLOO is (1 + 1/(G - 1)^2) ||mu_q||^2; `own_norm2` divides by that."""
    policy = bandit(1, 2, seed=3)
    prompt, own, parts = Prompt.of(policy, 0, G, "rloo"), 0.0, 0.0
    for draw in itertools.product(range(2), repeat=G):
        rewards_G, score_GD = policy.reward_PA[0, list(draw)], policy.score_PATD[0].sum(1)[list(draw)]
        chance = float(policy.probability_PA[0, list(draw)].prod())
        part_GD = (rewards_G - (rewards_G.sum() - rewards_G) / (G - 1))[:, None] * score_GD / G
        own, parts = own + chance * float(part_GD.sum(0).square().sum()), parts + chance * float(part_GD.square().sum())
    assert G / (G - 1) * (own - parts) == pytest.approx((1 + 1 / (G - 1) ** 2) * prompt.own2, rel=1e-12)


def test_the_noise_of_batches_of_another_size_is_predicted():
    """As `critical_batch_size` does: (trace_cov + n spared) / N - spared, of N prompts, from batches of n."""
    *_, batches = found(4, (2, 3, 4), 3, "oblr")
    for n, each in batches.items():
        for N, other in batches.items():
            predicted = (each.corrected.trace_cov + n * each.corrected.spared) / N - each.corrected.spared
            assert predicted == pytest.approx(other.variance, abs=1e-12)


def test_the_critical_batch_is_where_that_noise_equals_the_signal():
    m = Moments(signal2=0.5, trace_cov=6.0, n=4, spared=0.25)
    N = m.critical_batch_size
    assert (m.trace_cov + m.n * m.spared) / N - m.spared == pytest.approx(m.signal2)
    assert Moments(0.5, 6.0, 4).critical_batch_size == pytest.approx(12)


def test_of_very_many_prompts_nothing_is_corrected():
    plain = Moments(signal2=1.0, trace_cov=8.0, n=4)
    many = plain.of_rows(own2=3.0, rows=10**12)
    assert (many.signal2, many.trace_cov, many.n) == pytest.approx((1.0, 8.0, 4))


def test_any_prompts_will_do_that_were_not_chosen_by_what_they_earn():
    """Each has an estimate of its own, and other prompts do not enter it: their mean is that of any of them."""
    generator = torch.Generator().manual_seed(2)
    score_PGD, rewards_PG = torch.randn(5, 4, 3, generator=generator), torch.rand(5, 4, generator=generator)
    gram_PGG, valid_PG = score_PGD @ score_PGD.mT, torch.ones(5, 4, dtype=torch.bool)
    alone = [estimators.own_norm2(*(each[p : p + 1] for each in (gram_PGG, rewards_PG, valid_PG))) for p in range(5)]
    assert estimators.own_norm2(gram_PGG, rewards_PG, valid_PG) == pytest.approx(sum(alone) / 5)
    shifted = estimators.own_norm2(gram_PGG, rewards_PG + 7, valid_PG)
    assert shifted == pytest.approx(sum(alone) / 5)


def test_without_pairs_of_outputs_nothing_is_known_of_a_prompts_own_mean():
    """One output, or one that counts; prompts with more speak for those. By hand: (F_1 - F_2)(F_2 - F_1) K_12 / 2."""
    gram_PGG = torch.tensor([[[1.0, 3.0], [3.0, 1.0]], [[1.0, -2.0], [-2.0, 1.0]]])
    rewards_PG, all_PG = torch.tensor([[1.0, 3.0], [0.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert math.isnan(estimators.own_norm2(gram_PGG[:, :1, :1], rewards_PG[:, :1], all_PG[:, :1]))
    assert math.isnan(estimators.own_norm2(gram_PGG, rewards_PG, torch.tensor([[1, 0], [0, 0]]).bool()))
    assert estimators.own_norm2(gram_PGG, rewards_PG, torch.tensor([[1, 0], [1, 1]]).bool()) == 1.0
    assert estimators.own_norm2(gram_PGG, rewards_PG, all_PG) == (1.0 - 4 * 3 / 2) / 2
    plain = Moments(signal2=1.0, trace_cov=8.0, n=4)
    assert plain.of_rows(math.nan, 5) == plain


def test_outputs_that_do_not_count_enter_no_prompts_own_mean():
    """Nor do their scores, nor what stands in the place of their rewards."""
    gram_PGG = torch.tensor([[[1.0, 3.0, math.nan], [3.0, 1.0, 5.0], [math.nan, 5.0, 2.0]]])
    rewards_PG, valid_PG = torch.tensor([[1.0, 3.0, math.nan]]), torch.tensor([[True, True, False]])
    assert estimators.own_norm2(gram_PGG, rewards_PG, valid_PG) == -4 * 3 / 2
