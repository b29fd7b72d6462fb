"""Tasks whose prompts can be counted: signal and noise of a batch that holds a good part of them."""

from dataclasses import replace

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, SCHEDULES
from oblrpo.estimators.averages import MomentAverage
from oblrpo.rollout import sample
from oblrpo.scores import oracle
from oblrpo.settings import AlgorithmConfig, RolloutConfig, TrainConfig
from oblrpo.step import ledger
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer.setup import make_learner
from tests.trainer.learners import gradient_of, learner_of, samples_of

P, G, LONGEST = 3, 3, 4
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.2], [0.2, 0.3, 1.0]])
MASKED = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)
TIES = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.5], [0.2, 0.9, 0.9]])


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return sample(tiny_policy, ["a", "bc", "d"], G, LONGEST, 1.0)


def scores_of(policy, rollouts):
    rows = oracle.scores(policy.model, policy.logps(rollouts.sequences).logps_S)
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double().view(P, G, -1)


def own_norm2_by_hand(score_PGN, rewards_PG, valid_PG):
    """Of each prompt the mean over pairs of c_j c_k <s_j, s_k> / (1 + 1/(n-1)^2), c_j = F_j - mean of the others."""
    found = []
    for score_GN, reward_G, valid_G in zip(score_PGN, rewards_PG.double(), valid_PG, strict=True):
        places = valid_G.nonzero().flatten().tolist()
        c = {j: float(reward_G[j] - reward_G[[i for i in places if i != j]].mean()) for j in places}
        pairs = [c[j] * c[k] * float(score_GN[j] @ score_GN[k]) for j in places for k in places if j != k]
        found.append(sum(pairs) / len(pairs) / (1 + 1 / (len(places) - 1) ** 2) if pairs else 0.0)
    return torch.tensor(found, dtype=torch.float64)


def looks(rollouts, rewards_PG, valid_PG):
    """The weights with which a run looks at the prompts of these samples."""
    return ledger.drawn(rewards_PG, valid_PG, int(rollouts.sequences.ids_ST.sum()))


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("oblrpo_shrunk", {}),
        ("oblrpo_shrunk", {"prompts_per_micro_batch": 1}),
        ("oblrpo", {"tokens_per_micro_batch": 24}),
        ("rloo", {}),
        ("rloo", {"train_on": "all", "prompts_per_micro_batch": 2}),
    ],
)
@pytest.mark.parametrize("rewards_PG", [REWARDS, TIES])
def test_prompts_own_gradients_are_those_of_loop_autograd(
    tiny_policy, rollouts, algorithm, given, rewards_PG, monkeypatch
):
    """With norms or without, also of outputs that are left out of the gradient because their advantage is 0."""
    monkeypatch.setattr(ledger, "LOOKED_AT", 1 / 4)
    train_on = given.get("train_on", "exact")
    learner = learner_of(tiny_policy, algorithm, **{name: given[name] for name in given if name != "train_on"})
    learner.rows, learner.train_on = P, train_on
    gradient = gradient_of(learner, samples_of(rollouts, rewards_PG), 1)
    before = [p.grad.clone() for p in tiny_policy.parameters]
    plain = estimators.moments(gradient.group_norm2_P, gradient.norm2)
    all_PG = torch.ones_like(rewards_PG).bool()
    weight_P = looks(rollouts, rewards_PG, all_PG)
    assert (weight_P > 0).sum() >= 2
    own2_P = own_norm2_by_hand(scores_of(tiny_policy, rollouts), rewards_PG, all_PG)
    corrected = plain.of_rows(float(weight_P @ own2_P), P)
    scale = plain.trace_cov
    assert gradient.moments.signal2 == pytest.approx(corrected.signal2, abs=1e-4 * scale)
    assert gradient.moments.trace_cov == pytest.approx(corrected.trace_cov, abs=1e-4 * scale)
    assert abs(corrected.trace_cov - plain.trace_cov) > 0.01 * scale
    learner.rows = None
    gradient_of(learner, samples_of(rollouts, rewards_PG), 1)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(tiny_policy.parameters, before, strict=True))


def test_a_look_is_taken_at_prompts_with_two_outputs_that_count(tiny_policy, rollouts, monkeypatch):
    monkeypatch.setattr(ledger, "LOOKED_AT", 1)
    learner = learner_of(tiny_policy, "oblrpo_shrunk")
    learner.rows = P
    gradient = gradient_of(learner, samples_of(rollouts, REWARDS, MASKED), 1)
    weight_P = looks(rollouts, REWARDS, MASKED)
    assert weight_P[0] == 0
    own2 = float(weight_P @ own_norm2_by_hand(scores_of(tiny_policy, rollouts), REWARDS, MASKED))
    expected = estimators.moments(gradient.group_norm2_P, gradient.norm2).of_rows(own2, P)
    assert gradient.moments.spared == pytest.approx(expected.spared, rel=1e-4)
    assert gradient.trained_share == 1  # those without a reward went through the model, too


@pytest.mark.parametrize("looked_at", [16, 2, 0.5])
def test_whatever_chances_the_rewards_give_the_mean_is_that_of_all_prompts(looked_at, monkeypatch):
    """Of 20,000 draws, within 5 standard errors; of those prompts whose outputs earn differently."""
    monkeypatch.setattr(ledger, "LOOKED_AT", looked_at)
    generator = torch.Generator().manual_seed(3)
    rewards_PG, valid_PG = torch.rand(6, 3, generator=generator), torch.ones(6, 3, dtype=torch.bool)
    rewards_PG[1] *= 10
    rewards_PG[2] = 0.4
    valid_PG[3, 1:] = False
    valid_PG[4, 0] = False
    rewards_PG[~valid_PG] = torch.nan
    weight_RP = torch.stack([ledger.drawn(rewards_PG, valid_PG, seed) for seed in range(20_000)])
    assert not weight_RP[:, [2, 3]].any()
    errors_P = weight_RP.std(0) / len(weight_RP) ** 0.5
    for p in (0, 1, 4, 5):
        assert abs(float(weight_RP[:, p].mean()) - 1 / 5) < 5 * float(errors_P[p])
        assert 0 < float(errors_P[p]) < 0.2


def test_of_prompts_that_earn_alike_nothing_has_to_be_looked_at():
    """Their estimates are 0; and without two outputs that count, nothing is known."""
    alike_PG, all_PG = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert ledger.drawn(alike_PG, all_PG, 0).tolist() == [0.0, 0.0]
    assert ledger.drawn(alike_PG, torch.eye(2).bool(), 0).isnan().all()


def test_weights_of_a_sampler_weigh_the_scores(tiny_policy, rollouts, monkeypatch):
    monkeypatch.setattr(ledger, "LOOKED_AT", 1)
    learner = learner_of(tiny_policy, "rloo", sampler_correction="untruncated")
    learner.rows = P
    other = rollouts.sequences.own_SC * (tiny_policy.logps(rollouts.sequences).token_logps_SC.detach() * 1.1)
    rollouts = type(rollouts)(**(vars(rollouts) | {"sampler_logps_SC": other}))
    gradient = gradient_of(learner, samples_of(rollouts, REWARDS), 1)
    assert float(gradient.rho_PG.std()) > 0.01
    score_PGN = scores_of(tiny_policy, rollouts) * gradient.rho_PG.double()[..., None]
    weight_P = looks(rollouts, REWARDS, torch.ones_like(MASKED))
    own2 = float(weight_P @ own_norm2_by_hand(score_PGN, REWARDS, torch.ones_like(MASKED)))
    expected = estimators.moments(gradient.group_norm2_P, gradient.norm2).of_rows(own2, P)
    assert gradient.moments.spared == pytest.approx(expected.spared, rel=1e-4)


def test_without_number_or_in_later_updates_nothing_is_corrected(tiny_policy, rollouts):
    learner = learner_of(tiny_policy, "oblrpo")
    for rows, old_SC in ((None, None), (P, tiny_policy.logps(rollouts.sequences).token_logps_SC.detach())):
        learner.rows = rows
        gradient = gradient_of(learner, samples_of(rollouts, REWARDS), 1, old_SC)
        assert gradient.moments == estimators.moments(gradient.group_norm2_P, gradient.norm2)


@pytest.mark.parametrize("schedule", ["auto", "off"])
def test_later_updates_on_a_batch_enter_no_average(tiny_policy, rollouts, schedule):
    """They come from the same outputs: whatever their moments are, the averages are those of the first updates."""
    row = replace(ALGORITHMS["oblrpo_shrunk"], schedule=schedule)
    learner = learner_of(tiny_policy, row, optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=3)
    expected = MomentAverage(SCHEDULES[schedule].memory)
    for number, rewards_PG in enumerate((REWARDS, 1 - REWARDS), start=1):
        updates = learner.learn(samples_of(rollouts, rewards_PG), number).updates
        expected.add(updates[0].gradient.moments)
        assert len({update.gradient.moments for update in updates}) == 3
        assert [update.smoothed for update in updates] == [expected.moments] * 3
    assert learner.core.schedule.average.state_dict() == expected.state_dict()


def test_nothing_is_known_where_no_prompt_has_two_outputs_that_count(tiny_policy, rollouts):
    learner = learner_of(tiny_policy, "oblrpo_shrunk")
    learner.rows = P
    lone_PG = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    gradient = gradient_of(learner, samples_of(rollouts, REWARDS, lone_PG), 1)
    assert gradient.moments.spared == 0


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, 12),
        ({"rows": 64 * 100 - 1}, 64 * 100 - 1),
        ({"rows": 64 * 100}, None),
        ({"rows": None}, None),
        ({"dynamic_sampling": 1}, None),
        ({"num_generations": 1}, None),
        ({"algorithm": "rloo"}, 12),
        ({"algorithm": "oblrpo", "weighting": "constant"}, None),
        ({"algorithm": "rloo", "normalisation": "group_std"}, None),
        *(({"algorithm": "rloo", "baseline": name}, 12 * row.unbiased or None) for name, row in BASELINES.items()
          if row.trainable),
    ],
)  # fmt: skip
def test_whether_a_run_is_corrected_is_said_by_its_settings(tiny_policy, given, rows):
    """Prompts that are many or chosen by what they earn count as without number; so do biased gradients."""
    of = {"rows": 12, "dynamic_sampling": 0, "num_generations": G} | given
    rollout = RolloutConfig(**{name: of.pop(name) for name in ("dynamic_sampling", "num_generations")})
    number = of.pop("rows")
    config = TrainConfig(rollout=rollout, algorithm=AlgorithmConfig(**of))
    assert make_learner(tiny_policy, None, config, rows=number).rows == rows
