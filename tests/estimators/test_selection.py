"""Outputs drawn by their pull: the chances are the best, and nothing is biased."""

import itertools

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import (
    added_variance,
    baseline,
    chances_of_least_work,
    draw_outputs,
    selection,
    systematic,
)
from tests.estimators.bandits import bandit

RULES = {
    "least work": lambda *inputs: chances_of_least_work(*inputs, sampling=1.0),
    "cheap samples": lambda *inputs: chances_of_least_work(*inputs, sampling=0.1),
}


def at_kappa(kappa, *inputs):
    """The chances min(1, kappa |a| sqrt(w / c)), which no rule has to find."""
    return selection._at(kappa, *inputs)


SMALL = {"seldom": lambda *inputs: at_kappa(0.0, *inputs)}
"""One draw of which often keeps nothing."""


def draws(P=5, G=4, seed=0):
    """Coefficients, one in four of which is 0, squared norms and costs."""
    generator = torch.Generator().manual_seed(seed)
    coef_PG = torch.randn(P, G, generator=generator, dtype=torch.float64)
    coef_PG[:, 0] = 0
    return coef_PG, *(torch.rand(P, G, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2))


def final(chance_PG):
    """The chances once something is kept."""
    return chance_PG / (1 - (1 - chance_PG.sum(1)).clamp(min=0).prod())


def added(chance_PG, coef_PG, norm2_PG):
    chance_PG, pulls = final(chance_PG), coef_PG != 0
    square = coef_PG.square() * norm2_PG
    return float(((1 / chance_PG - 1) * square)[pulls].sum() / square.sum())


@pytest.mark.parametrize("rule", RULES)
def test_no_other_chances_of_the_same_cost_add_less(rule):
    coef_PG, norm2_PG, cost_PG = draws()
    found = RULES[rule](coef_PG, norm2_PG, cost_PG)
    assert found.added == pytest.approx(added(found.chance_PG, coef_PG, norm2_PG))
    assert found.cost == pytest.approx(float((final(found.chance_PG) * cost_PG).sum() / cost_PG.sum()))
    assert 0.05 < found.added < 2
    assert (found.chance_PG[coef_PG == 0] == 0).all()
    assert (found.chance_PG[coef_PG != 0] >= 0.05).all()
    pulls = coef_PG != 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        a, b = pulls.nonzero()[torch.randperm(int(pulls.sum()), generator=generator)[:2]]
        other_PG, step = found.chance_PG.clone(), 1e-3  # the same cost, moved from one output to another
        other_PG[tuple(a)] += step / cost_PG[tuple(a)]
        other_PG[tuple(b)] -= step / cost_PG[tuple(b)]
        if (other_PG[pulls] >= 0.05).all() and (other_PG <= 1).all():
            assert added(other_PG, coef_PG, norm2_PG) >= found.added - 1e-12


def test_no_other_chances_are_less_work():
    inputs = draws()
    least = chances_of_least_work(*inputs, sampling=1.0)
    whole = float(inputs[2].sum())
    for kappa in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0):
        other = at_kappa(kappa, *inputs)
        assert (1 + other.added) * (1 + other.cost * whole) >= (1 + least.added) * (1 + least.cost * whole) * 0.999


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_norms_and_costs_does_not_count(scale):
    coef_PG, norm2_PG, cost_PG = draws()
    found = chances_of_least_work(coef_PG, norm2_PG, cost_PG, sampling=1.0)
    other = chances_of_least_work(coef_PG, norm2_PG * scale, cost_PG / scale, sampling=1.0 / scale)
    torch.testing.assert_close(other.chance_PG, found.chance_PG)


def test_all_that_pull_are_kept_where_training_costs_next_to_nothing():
    coef_PG, norm2_PG, cost_PG = draws()
    pulls_PG = (coef_PG != 0).double()
    found = chances_of_least_work(coef_PG, norm2_PG, cost_PG, sampling=1e9)
    torch.testing.assert_close(found.chance_PG, pulls_PG)
    assert found.added == pytest.approx(0, abs=1e-6)
    nothing = chances_of_least_work(coef_PG * 0, norm2_PG, cost_PG, sampling=1.0)
    assert (nothing.added, nothing.cost, bool(nothing.chance_PG.any())) == (0, 0, False)


def test_an_output_whose_norm_is_taken_for_0_keeps_a_chance():
    coef_PG, norm2_PG, cost_PG = draws()
    norm2_PG[1, 2] = 0
    for rule in RULES.values():
        assert rule(coef_PG, norm2_PG, cost_PG).chance_PG[1, 2] >= 0.05


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda a, w, c: chances_of_least_work(a, w, c, -1.0), "at least 0"),
        (lambda a, w, c: chances_of_least_work(a, w[:2], c, 0.5), "shapes differ"),
        (lambda a, w, c: chances_of_least_work(a, -w, c, 0.5), "squared norms at least 0"),
        (lambda a, w, c: chances_of_least_work(a, w, 0 * c, 0.5), "costs positive"),
        (lambda a, w, c: chances_of_least_work(a / 0, w, c, 0.5), "must be finite"),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call(*draws())


def starts_of_intervals(chance_G):
    """The u at which what `systematic` keeps of a prompt changes, with 0 and 1."""
    return sorted({0.0, 1.0, *(float(1 - end % 1) for end in chance_G.cumsum(0))})


def selections(chance_PG):
    """Every outcome of a draw with its probability."""
    rows = []
    for chance_G in chance_PG:
        edges = starts_of_intervals(chance_G)
        rows.append([((low + high) / 2, high - low) for low, high in itertools.pairwise(edges) if high - low > 1e-12])
    for draw in itertools.product(*rows):
        uniform_P1 = torch.tensor([[u] for u, _ in draw], dtype=torch.float64)
        probability = torch.tensor([length for _, length in draw], dtype=torch.float64).prod()
        yield systematic(chance_PG, uniform_P1), probability


def counts(chance_PG, monkeypatch):
    """Every outcome of `draw_outputs`, how many times each output counts, with its probability."""
    found = [(kept_PG, probability) for kept_PG, probability in selections(chance_PG) if kept_PG.any()]
    some = sum(float(probability) for _, probability in found)
    for kept_PG, probability in found:
        with monkeypatch.context() as patched:
            patched.setattr("oblrpo.estimators.selection.systematic", lambda *_, kept_PG=kept_PG: kept_PG)
            yield draw_outputs(chance_PG), float(probability) / some
    if not found:
        yield draw_outputs(chance_PG), 1.0


@pytest.mark.parametrize(("P", "kappa", "least"), [(2, 0.0, 0.5), (2, 0.1, 0.2), (4, 0.1, 0.02), (2, 1.0, 0)])
def test_an_output_counts_once_on_average_however_seldom_one_is_kept(P, kappa, least, monkeypatch):
    found = at_kappa(kappa, *draws(P=P, G=4))
    assert (found.nothing > least) == (least > 0)
    mean_PG, cost = 0.0, 0.0
    for count_PG, probability in counts(found.chance_PG, monkeypatch):
        assert (count_PG > 0).any()
        mean_PG, cost = mean_PG + probability * count_PG, cost + probability * (count_PG > 0).double()
    torch.testing.assert_close(mean_PG, (found.chance_PG > 0).double())
    torch.testing.assert_close(cost, final(found.chance_PG))


def test_a_draw_that_keeps_nothing_is_made_again_and_one_of_nothing_is_not(monkeypatch):
    chance_PG, numbers = torch.tensor([[0.3, 0.0], [0.0, 0.2]]), [0.0, 0.5, 0.75]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.full((2, 1), numbers.pop(0), dtype=torch.float64))
    kept = draw_outputs(chance_PG)
    torch.testing.assert_close(kept, torch.tensor([[0.44 / 0.3, 0.0], [0.0, 0.0]]))
    assert not numbers
    assert not draw_outputs(chance_PG * 0).any()


@pytest.mark.parametrize("seed", range(3))
def test_each_output_is_kept_with_its_chance_and_their_number_hardly_varies(seed):
    inputs = draws(P=2, G=6, seed=seed)
    chance_PG = at_kappa(0.5, *inputs).chance_PG
    chance_PG[0, 1] = 1.0
    mean_PG, total = torch.zeros_like(chance_PG), 0.0
    for kept_PG, probability in selections(chance_PG):
        mean_PG += probability * kept_PG
        total += float(probability)
        assert ((kept_PG.sum(1) - chance_PG.sum(1)).abs() < 1).all()
    assert total == pytest.approx(1)
    torch.testing.assert_close(mean_PG, chance_PG, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kappa", [0.5, 0.0])
def test_the_variance_that_a_draw_adds_is_that_over_all_its_outcomes(kappa, monkeypatch):
    coef_PG, norm2_PG, cost_PG = draws(P=3, G=4)
    score_PGD = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chance_PG = at_kappa(kappa, coef_PG, norm2_PG, cost_PG).chance_PG
    expected = 0.0
    for count_PG, probability in counts(chance_PG, monkeypatch):
        off_PG = (count_PG - 1) * coef_PG
        expected += probability * float(off_PG.flatten().matmul(score_PGD.flatten(0, 1)).square().sum())
    gram_SS = score_PGD.flatten(0, 1) @ score_PGD.flatten(0, 1).mT
    assert added_variance(chance_PG, coef_PG, gram_SS) == pytest.approx(expected)
    alone_PG = gram_SS.diagonal().view(3, 4)
    assert expected != pytest.approx(added(chance_PG, coef_PG, alone_PG) * float((coef_PG.square() * alone_PG).sum()))
    assert added_variance((coef_PG != 0).double(), coef_PG, gram_SS) == 0


@pytest.mark.parametrize("rule", RULES | SMALL)
@pytest.mark.parametrize("name", ["rloo", "oblr"])
def test_gradient_and_moments_are_unbiased_over_sampling_and_selection(rule, name, monkeypatch):
    """Every batch of two prompts drawn from two, every two outputs of three, every outcome of the selection.

    Weights are a poor proxy of squared norms, and chances depend on all rewards of the batch.
    """
    N, G, policy = 2, 2, bandit(prompts=2, outputs=3, seed=5)
    proxy_PA = policy.norm2_PA.sqrt() + 0.3
    mean_D, second, moments_2 = torch.zeros(4, dtype=torch.float64), 0.0, torch.zeros(2).double()
    least, most = 1.0, 0.0
    for prompts in itertools.product(range(2), repeat=N):
        index_N = torch.tensor(prompts)
        for draw in itertools.product(range(3), repeat=N * G):
            index_PG = torch.tensor(draw).view(N, G)
            chance = float(policy.probability_PA[index_N[:, None], index_PG].prod()) / 2**N
            rewards_PG, score_PGD = (
                policy.reward_PA[index_N[:, None], index_PG],
                policy.score_PATD.sum(2)[index_N[:, None], index_PG],
            )
            proxy_PG = proxy_PA[index_N[:, None], index_PG]
            needs = {"norm2_PG": proxy_PG} if name == "oblr" else {}
            coef_PG = rewards_PG - baseline(name, rewards_PG, **needs)
            found = (RULES | SMALL)[rule](coef_PG, proxy_PG, 1 + index_PG.double())
            least = min(least, float(found.chance_PG[coef_PG != 0].min()) if coef_PG.any() else 1.0)
            most = max(most, found.nothing)
            for keep_PG, probability in counts(found.chance_PG, monkeypatch):
                group_PD = ((coef_PG * keep_PG)[..., None] * score_PGD).mean(1)
                gradient_D = group_PD.mean(0)
                weight = chance * probability
                mean_D += weight * gradient_D
                second += weight * float(gradient_D.square().sum())
                moments = estimators.moments(group_PD.square().sum(1), gradient_D.square().sum()).of_draw(found.nothing)
                moments_2 += weight * torch.tensor([moments.signal2, moments.trace_cov])
    true_D = policy.true_gradient()
    signal2 = float(true_D.square().sum())
    torch.testing.assert_close(mean_D, true_D)
    assert least < 0.9  # something was left out
    assert (most > 0.8) == (rule in SMALL)
    assert moments_2[0] == pytest.approx(signal2, rel=1e-6)
    assert moments_2[1] == pytest.approx(N * (second - signal2), rel=1e-6)
