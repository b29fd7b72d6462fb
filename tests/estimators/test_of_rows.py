"""Batches that hold a good part of all prompts: the finite population's correction, by listing every batch."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import Moments
from tests.estimators.bandits import bandit

M, G = 4, 2
POLICY = bandit(M, 2, seed=3)
ALL_PG = torch.ones(M, G, dtype=torch.bool)


@dataclass
class Found:
    """Of every batch of n of the prompts with every pair of their outputs: its chance, gradient and moments."""

    chance_B: torch.Tensor
    gradient_BD: torch.Tensor
    moments: list[Moments]
    plain: list[Moments]
    own2_B: torch.Tensor

    def mean(self, values):
        return float(self.chance_B @ torch.tensor(values, dtype=torch.float64))

    @property
    def variance(self):
        mean_D = self.chance_B @ self.gradient_BD
        return float(self.chance_B @ (self.gradient_BD - mean_D).square().sum(1))


def every_batch(n):
    """Without a baseline: pairs of a prompt's outputs are then independent."""
    rows = [[], [], [], [], []]
    prompts = list(itertools.combinations(range(M), n))
    for chosen in prompts:
        for draw in itertools.product(range(2), repeat=n * G):
            index_PG, q_P = torch.tensor(draw).view(n, G), torch.tensor(chosen)[:, None]
            chance = POLICY.probability_PA[q_P, index_PG].prod() / len(prompts)
            part_PGD = (POLICY.reward_PA[q_P, index_PG][..., None] * POLICY.score_PATD.sum(2)[q_P, index_PG]) / G
            group_PD = part_PGD.sum(1)
            norm2_P, gradient_D = group_PD.square().sum(1), group_PD.mean(0)
            own2 = estimators.own_norm2(norm2_P, part_PGD.square().sum(-1), ALL_PG[:n])
            plain = estimators.moments(norm2_P, gradient_D.square().sum())
            each = (chance.detach(), gradient_D, plain.of_rows(own2, M), plain, torch.tensor(own2, dtype=torch.float64))
            for row, value in zip(rows, each, strict=True):
                row.append(value)
    chance_B, gradient_BD, moments, plain, own2_B = rows
    return Found(torch.stack(chance_B), torch.stack(gradient_BD), moments, plain, torch.stack(own2_B))


FOUND = {n: every_batch(n) for n in (2, 3, 4)}


def mean_gradients():
    """mu_q of every prompt, (M, D)."""
    return ((POLICY.probability_PA * POLICY.reward_PA)[..., None] * POLICY.score_PATD.sum(2)).sum(1).detach()


@pytest.mark.parametrize("n", FOUND)
def test_signal_and_noise_are_unbiased(n):
    found, mu_MD = FOUND[n], mean_gradients()
    signal2 = float(mu_MD.mean(0).square().sum())
    assert float(found.chance_B.sum()) == pytest.approx(1, abs=1e-12)
    assert found.mean(found.own2_B.tolist()) == pytest.approx(float(mu_MD.square().sum(1).mean()), abs=1e-12)
    assert found.mean([each.signal2 for each in found.moments]) == pytest.approx(signal2, abs=1e-12)
    assert found.mean([each.trace_cov / n for each in found.moments]) == pytest.approx(found.variance, abs=1e-12)
    assert found.mean([each.spared for each in found.moments]) == pytest.approx(
        float((mu_MD - mu_MD.mean(0)).square().sum(1).mean()) / (M - 1), abs=1e-12
    )


def test_uncorrected_the_noise_of_a_batch_of_all_prompts_is_that_of_a_batch_with_replacement():
    """What differs between prompts is then taken for noise, and taken off the signal; by B / M for any n."""
    mu_MD = mean_gradients()
    lacks = float((mu_MD - mu_MD.mean(0)).square().sum(1).mean()) / (M - 1)
    for n, found in FOUND.items():
        signal2 = found.mean([each.signal2 for each in found.plain])
        assert signal2 == pytest.approx(float(mu_MD.mean(0).square().sum()) - lacks, abs=1e-12)
        assert found.mean([each.trace_cov / n for each in found.plain]) == pytest.approx(
            found.variance + lacks, abs=1e-12
        )
    assert lacks > 0.2 * float(mu_MD.mean(0).square().sum())  # or nothing of this would matter


def test_the_noise_of_batches_of_another_size_is_predicted():
    """As `critical_batch_size` does: (trace_cov + n spared) / N - spared, of N prompts, from batches of n."""
    for n, found in FOUND.items():
        for N, other in FOUND.items():
            predicted = [(each.trace_cov + n * each.spared) / N - each.spared for each in found.moments]
            assert found.mean(predicted) == pytest.approx(other.variance, abs=1e-12)


def test_the_critical_batch_is_where_that_noise_equals_the_signal():
    m = Moments(signal2=0.5, trace_cov=6.0, n=4, spared=0.25)
    N = m.critical_batch_size
    assert (m.trace_cov + m.n * m.spared) / N - m.spared == pytest.approx(m.signal2)
    assert Moments(0.5, 6.0, 4).critical_batch_size == pytest.approx(12)


def test_of_very_many_prompts_nothing_is_corrected():
    plain = Moments(signal2=1.0, trace_cov=8.0, n=4)
    many = plain.of_rows(own2=3.0, rows=10**12)
    assert (many.signal2, many.trace_cov, many.n) == pytest.approx((1.0, 8.0, 4))


def test_without_pairs_of_outputs_nothing_is_known_of_a_prompts_own_mean():
    """G = 1, or one that counts; prompts with more speak for those."""
    norm2_P, part2_PG = torch.tensor([4.0, 9.0]), torch.tensor([[4.0, 1.0], [2.0, 3.0]])
    assert estimators.own_norm2(norm2_P, part2_PG[:, :1], ALL_PG[:2, :1]) is None
    assert estimators.own_norm2(norm2_P, part2_PG, torch.tensor([[1, 0], [0, 0]]).bool()) is None
    assert estimators.own_norm2(norm2_P, part2_PG, torch.tensor([[1, 0], [1, 1]]).bool()) == pytest.approx(2 * (9 - 5))
    assert estimators.own_norm2(norm2_P, part2_PG, ALL_PG[:2]) == pytest.approx((2 * (4 - 5) + 2 * (9 - 5)) / 2)


def test_outputs_that_do_not_count_enter_no_prompts_own_mean():
    """By hand: ||g||^2 of 5 and parts of 1 and 2 over the two that count, 2 / 1 (5 - 3); a lone output says nothing."""
    part2_PG = torch.tensor([[1.0, 2.0, 7.0], [4.0, 7.0, float("nan")]])
    valid_PG = torch.tensor([[True, True, False], [True, False, False]])
    assert estimators.own_norm2(torch.tensor([5.0, 4.0]), part2_PG, valid_PG) == 4.0
