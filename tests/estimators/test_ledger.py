"""The ledger against score vectors written out, and against every batch of a tiny population of prompts."""

import itertools
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES
from tests.estimators.bandits import bandit

PROMPT_PROBABILITY = (0.4, 0.6)
NAMES = ("none", "rloo", "oblr", "mean", "eob")


def random_batch(prompts=5, outputs=3, dimensions=7, seed=0):
    torch.manual_seed(seed)
    rewards_PG = torch.randn(prompts, outputs, dtype=torch.float64)
    score_SD = torch.randn(prompts * outputs, dimensions, dtype=torch.float64)
    return rewards_PG, score_SD, score_SD @ score_SD.T


def advantages(names, rewards_PG, score_SD):
    norm2_PG = score_SD.square().sum(1).view_as(rewards_PG)
    inputs = {"norm2_PG": norm2_PG, "prior": estimators.Prior(2.0)}
    return {name: rewards_PG - estimators.baseline(name, rewards_PG, **inputs) for name in names}


def take(rewards_PG, score_SD, names=NAMES, coefs=None):
    coefs = coefs or advantages(names, rewards_PG, score_SD)
    unbiased = {name: BASELINES[name].unbiased for name in names}
    return estimators.ledger(score_SD @ score_SD.T, coefs, rewards_PG, unbiased)


def prompt_gradients(coef_PG, score_SD):
    return (coef_PG[..., None] * score_SD.view(*coef_PG.shape, -1)).mean(1)


def test_variance_and_signal_are_those_of_the_gradients_written_out():
    rewards_PG, score_SD, _ = random_batch()
    entries = take(rewards_PG, score_SD).entries
    assert list(entries) == list(NAMES)
    for name, coef_PG in advantages(NAMES, rewards_PG, score_SD).items():
        g_PD = prompt_gradients(coef_PG, score_SD)
        pairs = [g_PD[i] @ g_PD[k] for i, k in itertools.permutations(range(5), 2)]
        assert entries[name].variance == pytest.approx(float(g_PD.var(0).sum() / 5), rel=1e-12)
        assert entries[name].signal2 == pytest.approx(float(sum(pairs) / 20), rel=1e-10)


@pytest.mark.parametrize("G", [2, 3, 4])
def test_between_by_pairs_of_outputs_written_out(G):
    """||mu||^2 from (F_j - b_j)(F_k - b_k) <s_j, s_k>, b_j of the outputs but j, which is 1 + 1/(G-1)^2 times that."""
    P = 4
    rewards_PG, score_SD, _ = random_batch(P, G)
    score_PGD = score_SD.view(P, G, -1)
    terms = []
    for p in range(P):
        for j, k in itertools.permutations(range(G), 2):
            c_j, c_k = (
                rewards_PG[p, one] - sum(rewards_PG[p, i] for i in range(G) if i != one) / (G - 1) for one in (j, k)
            )
            terms.append(c_j * c_k * (score_PGD[p, j] @ score_PGD[p, k]) / (1 + 1 / (G - 1) ** 2))
    mu2 = float(sum(terms) / len(terms))
    ledger = take(rewards_PG, score_SD)
    assert ledger.between == pytest.approx((mu2 - ledger.entries["rloo"].signal2) / P, rel=1e-10)


def list_batches(prompts, outputs, actions, names):
    """Expectations over every batch of prompts drawn with replacement, and of their outputs."""
    policy = bandit(2, actions, seed=11)
    score_PAD, D = policy.score_PATD.sum(2), policy.score_PATD.shape[-1]
    totals = {name: torch.zeros(2, dtype=torch.float64) for name in names}
    mean, second = {name: torch.zeros(D, dtype=torch.float64) for name in names}, dict.fromkeys(names, 0.0)
    between = 0.0
    for which in itertools.product(range(2), repeat=prompts):
        for draw in itertools.product(range(actions), repeat=prompts * outputs):
            index_PG, row_P1 = torch.tensor(draw).view(prompts, outputs), torch.tensor(which)[:, None]
            chance = math.prod(PROMPT_PROBABILITY[q] for q in which)
            chance *= float(policy.probability_PA[row_P1, index_PG].prod())
            rewards_PG, score_SD = policy.reward_PA[row_P1, index_PG], score_PAD[row_P1, index_PG].flatten(0, 1)
            coefs = advantages(names, rewards_PG, score_SD)
            ledger = take(rewards_PG, score_SD, names, coefs)
            between += chance * ledger.between
            for name, coef_PG in coefs.items():
                entry = ledger.entries[name]
                totals[name] += chance * torch.tensor([entry.variance, entry.signal2], dtype=torch.float64)
                gradient = prompt_gradients(coef_PG, score_SD).mean(0)
                mean[name] += chance * gradient
                second[name] += chance * float(gradient @ gradient)
    mu_PD = (policy.probability_PA[..., None] * policy.reward_PA[..., None] * score_PAD).sum(1)
    return totals, between, mean, second, mu_PD


@pytest.mark.parametrize(
    ("prompts", "outputs", "actions", "names"),
    [(2, 2, 3, NAMES[:3]), (2, 2, 2, NAMES), (2, 3, 2, NAMES[:3]), (3, 2, 2, ("oblr", "mean")), (2, 1, 3, ("none",))],
)
def test_every_account_is_unbiased_by_exact_enumeration(prompts, outputs, actions, names):
    totals, between, mean, second, mu_PD = list_batches(prompts, outputs, actions, names)
    probability_P = torch.tensor(PROMPT_PROBABILITY, dtype=torch.float64)
    true = probability_P @ mu_PD
    between_expected = float(probability_P @ mu_PD.square().sum(1) - true @ true) / prompts
    for name in names:
        variance, signal2 = totals[name].tolist()
        norm2_of_mean = float(mean[name] @ mean[name])
        assert variance == pytest.approx(second[name] - norm2_of_mean, rel=1e-10), name
        assert signal2 == pytest.approx(norm2_of_mean, rel=1e-9, abs=1e-15), name
        if BASELINES[name].unbiased and outputs > 1:
            torch.testing.assert_close(mean[name], true)
    if outputs > 1:
        assert between == pytest.approx(between_expected, rel=1e-9)
    else:
        assert math.isnan(between)


def test_a_baseline_that_looks_at_other_prompts_is_off_by_order_one_over_the_batch():
    """Prompts' gradients then depend on each other, which no sample covariance sees. RLOO's do not."""
    off = []
    for prompts in (2, 3):
        totals, _, mean, second, _ = list_batches(prompts, 2, 2, ("oblr_shrunk", "rloo"))
        true = {name: second[name] - float(mean[name] @ mean[name]) for name in totals}
        assert float(totals["rloo"][0]) == pytest.approx(true["rloo"], rel=1e-10)
        off.append(1 - float(totals["oblr_shrunk"][0]) / true["oblr_shrunk"])
        assert float(totals["oblr_shrunk"][:2].sum()) == pytest.approx(
            second["oblr_shrunk"], rel=1e-10
        )  # signal2 has it
    assert 0.5 > off[0] > off[1] > 0.01


def test_the_group_mean_has_rloos_variance_times_its_scale_squared():
    for G in (2, 3, 6):
        rewards_PG, score_SD, _ = random_batch(4, G)
        entries = take(rewards_PG, score_SD, ("rloo", "mean")).entries
        scale2 = ((G - 1) / G) ** 2
        assert entries["mean"].variance == pytest.approx(scale2 * entries["rloo"].variance, rel=1e-12)
        assert entries["mean"].signal2 == pytest.approx(scale2 * entries["rloo"].signal2, rel=1e-10)


def test_of_biased_baselines_alone_one_batch_cannot_tell_what_prompts_bring():
    rewards_PG, score_SD, _ = random_batch()
    assert not math.isnan(take(rewards_PG, score_SD, ("mean", "oblr")).between)
    assert math.isnan(take(rewards_PG, score_SD, ("mean", "eob")).between)


def test_between_does_not_see_a_shift_of_all_rewards():
    rewards_PG, score_SD, _ = random_batch()
    plain, shifted = (take(rewards_PG + shift, score_SD, ("none", "rloo")).between for shift in (0.0, 1000.0))
    assert shifted == pytest.approx(plain, rel=1e-6)


def test_groups_of_different_sizes_are_those_without_the_outputs_that_do_not_count():
    """g_i over the valid outputs; ||mu||^2 from pairs of them; NaN and padding do not matter."""
    rewards_PG, score_SD, _ = random_batch(5, 4)
    sizes = (4, 3, 2, 1, 4)
    valid_PG = torch.arange(4) < torch.tensor(sizes)[:, None]
    norm2_PG = score_SD.square().sum(1).view(5, 4)
    rewards_PG = torch.where(valid_PG, rewards_PG, torch.nan)
    broken_SS = torch.where(valid_PG.flatten()[:, None], score_SD @ score_SD.T, torch.nan)
    coefs = {
        name: rewards_PG - estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG, valid_PG=valid_PG)
        for name in ("none", "rloo", "oblr")
    }
    found = estimators.ledger(broken_SS, coefs, rewards_PG, dict.fromkeys(coefs, True), valid_PG=valid_PG)
    score_PGD = score_SD.view(5, 4, -1)
    kept = [rewards_PG[p, :size] for p, size in enumerate(sizes)]
    for name, coef_PG in coefs.items():
        g_PD = torch.stack([(coef_PG[p, :n, None] * score_PGD[p, :n]).mean(0) for p, n in enumerate(sizes)])
        assert found.entries[name].variance == pytest.approx(float(g_PD.var(0).sum() / 5), rel=1e-12)
    mu2 = []
    for p, n in enumerate(sizes):
        pairs = []
        for j, k in itertools.permutations(range(n), 2):
            c_j, c_k = (kept[p][one] - (kept[p].sum() - kept[p][one]) / (n - 1) for one in (j, k))
            pairs.append(c_j * c_k * (score_PGD[p, j] @ score_PGD[p, k]))
        mu2 += [sum(pairs) / len(pairs) / (1 + 1 / (n - 1) ** 2)] if pairs else []
    entry = found.entries["rloo"]
    g_PD = torch.stack([(coefs["rloo"][p, :n, None] * score_PGD[p, :n]).mean(0) for p, n in enumerate(sizes)])
    within = (float(g_PD.square().sum(1).mean()) - float(sum(mu2) / len(mu2))) / 5
    # Prompts with one output have the reward itself for `rloo`: between is of the same advantages.
    assert found.between == pytest.approx(entry.variance - within, rel=1e-10)


def test_normalised_coefficients_are_accepted():
    """GRPO's: over the group's standard deviation."""
    rewards_PG, score_SD, gram_SS = random_batch()
    coef_PG = (rewards_PG - rewards_PG.mean(1, keepdim=True)) / estimators.NORMALISATIONS["group_std"](rewards_PG)
    entry = estimators.ledger(gram_SS, {"grpo": coef_PG}, rewards_PG, {"grpo": False}).entries["grpo"]
    assert entry.variance == pytest.approx(float(prompt_gradients(coef_PG, score_SD).var(0).sum() / 5), rel=1e-12)


def test_token_weighted_scores_have_inner_products_of_their_own():
    rewards_PG, score_SD, gram_SS = random_batch()
    weighted_SD = score_SD + 0.3 * torch.randn_like(score_SD)
    coefs, unbiased = {"rloo": rewards_PG, "otb": torch.ones_like(rewards_PG)}, {"rloo": False, "otb": False}
    entries = estimators.ledger(gram_SS, coefs, rewards_PG, unbiased, {"otb": weighted_SD @ weighted_SD.T}).entries
    expected = float(prompt_gradients(coefs["otb"], weighted_SD).var(0).sum() / 5)
    assert entries["otb"].variance == pytest.approx(expected, rel=1e-12)
    plain = estimators.ledger(gram_SS, coefs, rewards_PG, unbiased).entries
    assert entries["rloo"] == plain["rloo"]
    assert entries["otb"].variance != pytest.approx(plain["otb"].variance)


def test_float32_inner_products_are_added_up_in_float64():
    rewards_PG, score_SD, _ = random_batch()
    gram_SS = (score_SD.float() @ score_SD.float().T).double()
    coefs, unbiased = {"none": rewards_PG}, {"none": True}
    double = estimators.ledger(gram_SS, coefs, rewards_PG, unbiased).entries["none"]
    assert estimators.ledger(gram_SS.float(), coefs, rewards_PG, unbiased).entries["none"] == double


def test_equal_rewards_have_no_gradient_and_no_noise():
    gram_SS = random_batch()[2]
    nothing = torch.zeros(5, 3)
    entry = estimators.ledger(gram_SS, {"rloo": nothing}, torch.ones(5, 3), {"rloo": True}).entries["rloo"]
    assert (entry.variance, entry.signal2) == (0, 0)


def test_of_several_estimates_the_mean_is_used():
    rewards_PG, _, gram_SS = random_batch()
    noise_SS = torch.randn_like(gram_SS)
    two = estimators.ledger(
        torch.stack([gram_SS + noise_SS, gram_SS - noise_SS]), {"a": rewards_PG}, rewards_PG, {"a": True}
    )
    one = estimators.ledger(gram_SS, {"a": rewards_PG}, rewards_PG, {"a": True})
    assert two.between == pytest.approx(one.between)
    assert two.entries["a"].variance == pytest.approx(one.entries["a"].variance)


def test_bad_input_is_named():
    rewards_PG, _, gram_SS = random_batch()
    coefs, unbiased = {"rloo": rewards_PG}, {"rloo": True}
    with pytest.raises(ValueError, match="at least 2 prompts"):
        estimators.ledger(gram_SS[:3, :3], {"rloo": rewards_PG[:1]}, rewards_PG[:1], unbiased)
    with pytest.raises(ValueError, match=r"gram_SS has shape \(14, 14\), not \(15, 15\)"):
        estimators.ledger(gram_SS[1:, 1:], coefs, rewards_PG, unbiased)
    with pytest.raises(ValueError, match=r"otb has shape \(15, 14\), not \(15, 15\)"):
        estimators.ledger(gram_SS, coefs, rewards_PG, unbiased, {"otb": gram_SS[:, 1:]})
    with pytest.raises(ValueError, match=r"rloo: advantages of shape \(3, 5\), rewards \(5, 3\)"):
        estimators.ledger(gram_SS, {"rloo": rewards_PG.T}, rewards_PG, unbiased)


def test_every_name_needs_its_claim():
    with pytest.raises(ValueError, match="unbiased does not say whether b is"):
        estimators.ledger(torch.eye(4), {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, torch.ones(2, 2), {"a": True})
