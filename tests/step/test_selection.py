"""Training on outputs that are drawn by their pull: the same mean gradient from fewer of them."""

import dataclasses
import itertools

import pytest
import torch

from oblrpo import estimators
from oblrpo.algorithms import ALGORITHMS
from oblrpo.errors import InputError
from oblrpo.estimators import selection as chances
from oblrpo.estimators import systematic
from oblrpo.rollout import TransformersSampler
from oblrpo.rollout.vllm import features_of_logps
from oblrpo.scores import ScoreTape
from oblrpo.settings import AlgorithmConfig, ScoresConfig, TrainConfig
from oblrpo.step import selection
from oblrpo.trainer import StepResult
from oblrpo.trainer.metrics import step_metrics
from oblrpo.trainer.setup import check
from tests.estimators.test_selection import starts_of_intervals
from tests.trainer.learners import learner_of, sampled

P, G, LONGEST = 3, 3, 4
LOGIT = ScoresConfig(score_norms="logit", ledger_steps=0)


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return TransformersSampler(tiny_policy, features=True).sample(["a", "bc", "d"], G, LONGEST, 1.0)


@pytest.fixture
def rewards_PG():
    return torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.7, 0.1], [1.0, 1.0, 1.0]])


def learner_for(policy, algorithm, scores=LOGIT, **settings):
    row = dataclasses.replace(ALGORITHMS[algorithm], schedule="off", ratio="sequence")
    return learner_of(policy, row, scores=scores, **settings)


def flat(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters]).double()


def score_of(policy, sequences, row):
    """The gradient of one completion's log-probability, by loop autograd."""
    logp = policy.logps(sequences.at(slice(row, row + 1))).logps_S.sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(logp, policy.parameters)]).double()


@pytest.fixture
def drawn_at(monkeypatch):
    """Makes the draws of a selection come from these numbers."""

    def at(uniform_P1):
        monkeypatch.setattr(selection.torch, "rand", lambda *_, **__: uniform_P1)

    return at


def keep_seldom(monkeypatch):
    """Makes every chance the least there is, so that one draw often keeps nothing."""
    least = lambda coef_PG, norm2_PG, cost_PG, sampling: chances._at(0.0, coef_PG, norm2_PG, cost_PG)  # noqa: E731
    monkeypatch.setattr("oblrpo.estimators.chances_of_least_work", least)


def every_draw(learner, batch, drawn_at):
    """Numbers for the draws, with the probability of what they lead to."""
    seen = []
    find = estimators.chances_of_least_work

    def noted(*inputs):
        seen.append(find(*inputs))
        return seen[-1]

    estimators.chances_of_least_work = noted
    drawn_at(torch.full((P, 1), 1 - 1e-6, dtype=torch.float64))  # keeps something
    try:
        learner.gradient(batch, 1)
    finally:
        estimators.chances_of_least_work = find
    rows = []
    for chance_G in seen[0].chance_PG:
        edges = starts_of_intervals(chance_G)
        rows.append([((low + high) / 2, high - low) for low, high in itertools.pairwise(edges) if high - low > 1e-9])
    for draw in itertools.product(*rows):
        probability = torch.tensor([length for _, length in draw], dtype=torch.float64).prod()
        uniform_P1 = torch.tensor([[u] for u, _ in draw], dtype=torch.float64)
        if systematic(seen[0].chance_PG, uniform_P1).any():  # else it is drawn again
            yield uniform_P1, float(probability) / (1 - seen[0].nothing)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("oblrpo", {}),
        ("oblrpo_shrunk", {}),
        ("oblrpo_shrunk", {"tokens_per_micro_batch": 24}),
        ("rloo", {"scores": ScoresConfig(ledger_steps=0)}),
        ("grpo", {"prompts_per_micro_batch": 1}),
        ("reinforce", {}),
    ],
)
@pytest.mark.parametrize("often", [True, False])
def test_the_mean_over_all_draws_is_the_gradient_of_all(
    tiny_policy, rollouts, rewards_PG, drawn_at, algorithm, settings, often, monkeypatch
):
    if not often:
        keep_seldom(monkeypatch)
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1, 1] = False
    whole = learner_for(tiny_policy, algorithm, **settings, train_on="all")
    if "tokens_per_micro_batch" in settings:  # whose prior would be of earlier steps alone
        whole = learner_for(tiny_policy, algorithm, train_on="all")
    moments = whole.gradient(whole.batch(sampled(rollouts, rewards_PG, valid_PG)), 1).moments
    expected = flat(tiny_policy)
    learner = learner_for(tiny_policy, algorithm, **settings, train_on="compute-optimal")
    batch = learner.batch(sampled(rollouts, rewards_PG, valid_PG))
    mean, total, shares, signal2 = torch.zeros_like(expected), 0.0, set(), 0.0
    for uniform_P1, probability in list(every_draw(learner, batch, drawn_at)):
        drawn_at(uniform_P1)
        gradient = learner.gradient(batch, 1)
        mean += probability * flat(tiny_policy)
        total += probability
        shares.add(round(gradient.trained, 6))
        signal2 += probability * gradient.moments.signal2
        torch.testing.assert_close(gradient.baseline_PG.isfinite(), torch.ones(P, G, dtype=torch.bool))
    assert total == pytest.approx(1)
    torch.testing.assert_close(mean, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)
    assert min(shares) < 1
    assert signal2 == pytest.approx(moments.signal2, rel=1e-3, abs=1e-4 * moments.trace_cov)  # given the outputs
    assert bool(gradient.batch.draw.nothing > 0.01) == (not often)


def test_with_log_probabilities_alone_and_their_correction_the_mean_stays(tiny_policy, rollouts, rewards_PG, drawn_at):
    """As with vLLM: proxies from log-probabilities, and importance weights of another sampler."""
    off_SC = 0.1 * torch.randn(rollouts.sequences.own_SC.shape, generator=torch.Generator().manual_seed(0))
    logps_SC = (tiny_policy.logps(rollouts.sequences).logp_SC.detach() + off_SC).clamp(max=-1e-3)
    features = features_of_logps(logps_SC, rollouts.sequences.own_SC)
    rollouts = dataclasses.replace(rollouts, sampler_logps_SC=logps_SC, features=features)
    whole = learner_for(tiny_policy, "rloo", train_on="all", sampler_correction="truncated")
    whole.gradient(whole.batch(sampled(rollouts, rewards_PG)), 1)
    expected, mean = flat(tiny_policy), 0.0
    learner = learner_for(tiny_policy, "rloo", train_on="compute-optimal", sampler_correction="truncated")
    batch = learner.batch(sampled(rollouts, rewards_PG))
    for uniform_P1, probability in list(every_draw(learner, batch, drawn_at)):
        drawn_at(uniform_P1)
        gradient = learner.gradient(batch, 1)
        mean += probability * flat(tiny_policy)
    assert gradient.trained < 1
    torch.testing.assert_close(mean, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_a_step_says_what_it_trained_on_and_what_that_added(tiny_policy, rollouts, rewards_PG):
    learner = learner_for(tiny_policy, "oblrpo_shrunk", train_on="compute-optimal")
    torch.manual_seed(0)
    updates = learner.learn(sampled(rollouts, rewards_PG), step=1)
    metrics = step_metrics(1, StepResult(rollouts, rewards_PG, torch.ones(P, G, dtype=torch.bool), updates), 0)
    assert 0 < metrics["completions/trained_ratio"] < 1
    assert metrics["added_variance"] == updates[0].gradient.batch.draw.added > 0
    everything = tiny_policy.logps(rollouts.sequences).entropy_SC * rollouts.sequences.own_SC
    assert metrics["entropy"] == pytest.approx(float(everything.sum() / rollouts.sequences.own_SC.sum()), abs=0.05)


@pytest.mark.parametrize("often", [True, False])
@pytest.mark.parametrize("algorithm", ["oblrpo_shrunk", "grpo"])
def test_the_ledger_measures_the_variance_that_leaving_out_adds(
    tiny_policy, rollouts, rewards_PG, drawn_at, algorithm, often, monkeypatch
):
    if not often:
        keep_seldom(monkeypatch)
    scores = ScoresConfig(score_norms="logit", ledger_steps=3)
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1, 1] = False
    whole = learner_for(tiny_policy, algorithm, train_on="all")
    whole.gradient(whole.batch(sampled(rollouts, rewards_PG, valid_PG)), 1)
    expected = flat(tiny_policy)
    learner = learner_for(tiny_policy, algorithm, scores, train_on="compute-optimal", exact_ledger=True)
    batch = learner.batch(sampled(rollouts, rewards_PG, valid_PG))
    added = 0.0
    for uniform_P1, probability in list(every_draw(learner, batch, drawn_at)):
        drawn_at(uniform_P1)
        gradient = learner.gradient(batch, 1)
        added += probability * float((flat(tiny_policy) - expected).square().sum())
    scores_SN = torch.stack([score_of(tiny_policy, rollouts.sequences, s) for s in range(P * G)])
    coef_S = gradient.batch.draw.coef_PG.flatten().double()
    alone = float(coef_S.square() @ scores_SN.square().sum(1))
    group_PN = P * (coef_S[:, None] * scores_SN).view(P, G, -1).sum(1)
    variance = float((group_PN - group_PN.mean(0)).square().sum()) / P / (P - 1)
    (update,) = learner.learn(sampled(rollouts, rewards_PG, valid_PG), step=3)
    assert update.further["added_variance/measured"] == pytest.approx(added / alone, rel=1e-3)
    assert update.further["added_variance/of_gradient"] == pytest.approx(added / variance, rel=1e-3)
    assert "added_variance/measured" not in learner.learn(sampled(rollouts, rewards_PG, valid_PG), step=4)[0].further


def test_a_step_tells_nothing_of_the_ledger_of_a_skipped_one(tiny_policy, rollouts, rewards_PG, monkeypatch):
    scores = ScoresConfig(score_norms="logit", ledger_steps=3)
    learner = learner_for(tiny_policy, "oblrpo_shrunk", scores, train_on="compute-optimal")
    with monkeypatch.context() as patched:
        patched.setattr(ScoreTape, "accumulate", lambda *_: torch.full((P,), torch.inf))
        assert learner.learn(sampled(rollouts, rewards_PG), step=3) == []
    (update,) = learner.learn(sampled(rollouts, rewards_PG), step=4)
    assert not [name for name in update.further if name.startswith("added_variance/")]


def test_one_seed_one_selection(tiny_policy, rollouts, rewards_PG, monkeypatch):
    keep_seldom(monkeypatch)
    kept = []
    for seed in (3, 3, 4, 5, 6):
        learner = learner_for(tiny_policy, "oblrpo_shrunk", train_on="compute-optimal")
        torch.manual_seed(seed)
        kept.append(learner.gradient(learner.batch(sampled(rollouts, rewards_PG)), 1).batch.keep_PG)
    assert torch.equal(kept[0], kept[1])
    assert not all(torch.equal(kept[0], other) for other in kept[2:])


def test_further_updates_keep_the_selection(tiny_policy, rollouts, rewards_PG):
    learner = learner_for(tiny_policy, "oblrpo_shrunk", train_on="compute-optimal", num_iterations=3, lr=0.02)
    torch.manual_seed(0)
    first, *others = (update.gradient for update in learner.learn(sampled(rollouts, rewards_PG), step=1))
    for other in others:
        assert torch.equal(other.batch.keep_PG, first.batch.keep_PG)
        rho_PG = (other.logps_PG - first.logps_PG).exp()[first.batch.keep_PG > 0]
        torch.testing.assert_close(other.rho_PG[first.batch.keep_PG > 0], rho_PG)
        count_N = first.batch.keep_PG[first.batch.keep_PG > 0].double()
        rho_N = rho_PG.double()
        expected = float((count_N * rho_N).sum() ** 2 / (count_N.sum() * (count_N * rho_N**2).sum()))
        assert other.ess_ratio == pytest.approx(expected)
    assert others[-1].ess_ratio < 1


def test_exact_norms_of_what_was_drawn_teach_the_proxy(tiny_policy, rollouts, rewards_PG):
    scores = ScoresConfig(score_norms="calibrated", calibration_steps=2, ledger_steps=0)
    learner = learner_for(tiny_policy, "oblrpo_shrunk", scores, train_on="compute-optimal")
    torch.manual_seed(0)
    assert [*learner.learn(sampled(rollouts, rewards_PG), step=1)[0].further] == ["added_variance"]
    (update,) = learner.learn(sampled(rollouts, rewards_PG), step=2)
    compared = {name.split("agreement_")[-1] for name in update.further} - {"added_variance"}
    assert compared == {"length", "length16", "logit", "calibrated"}
    kept_PG = update.gradient.batch.keep_PG > 0
    assert 0 < learner.baseline.weights.calibrated.observed <= int(kept_PG.sum())
    assert torch.equal(update.gradient.norm2_PG.isfinite(), kept_PG)


def test_a_sampler_that_tells_nothing_is_refused(tiny_policy, rollouts, rewards_PG):
    learner = learner_for(tiny_policy, "oblrpo_shrunk", train_on="compute-optimal")
    silent = dataclasses.replace(rollouts, features=None)
    with pytest.raises(InputError, match="this sampler does not report what train_on needs"):
        learner.learn(sampled(silent, rewards_PG), step=1)


@pytest.mark.parametrize("word", ["most", "0.4", "tolerance"])
def test_words_that_name_no_selection_are_refused(word):
    with pytest.raises(InputError, match="train_on must be all, exact or compute-optimal"):
        check(TrainConfig(algorithm=AlgorithmConfig(train_on=word)))
