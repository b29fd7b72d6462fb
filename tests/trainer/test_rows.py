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
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer.setup import make_learner
from tests.trainer.learners import learn, learner_of, one_pass, samples_of

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


ALL = torch.ones(P, G, dtype=torch.bool)


def expected_moments(policy, rollouts, rewards_PG, valid_PG, found, looked=None, rho_PG=None):
    """By loop autograd, of prompts that take part: the plain moments, and those of a batch of so many rows.

    Prompts' own gradients are those of the prompts that were looked at.
    """
    batch, looked = found.batch, range(P) if looked is None else looked
    a_PG = (found.rho_PG * found.advantages_PG * batch.weight_PG / batch.divisor_PG).double()
    score_PGN = scores_of(policy, rollouts)
    g_PN = (a_PG[..., None] * score_PGN).sum(1) / batch.count_P[:, None].clamp(min=1)
    plain = estimators.moments(
        g_PN[(batch.count_P > 0)].square().sum(1), g_PN[(batch.count_P > 0)].mean(0).square().sum()
    )
    rho_PG = found.rho_PG if rho_PG is None else rho_PG
    own2_P = own_norm2_by_hand(score_PGN * rho_PG.double()[..., None], rewards_PG, valid_PG)
    known = [i for i in looked if valid_PG[i].sum() > 1]
    return plain, plain.of_rows(float(own2_P[known].mean()), P)


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("oblrpo_shrunk", {}),
        ("oblrpo_shrunk", {"prompts_per_micro_batch": 1}),
        ("oblrpo", {"tokens_per_micro_batch": 24}),
        ("rloo", {}),
        ("rloo", {"prompts_per_micro_batch": 2}),
    ],
)
@pytest.mark.parametrize("rewards_PG", [REWARDS, TIES])
def test_prompts_own_gradients_are_those_of_loop_autograd(tiny_policy, rollouts, algorithm, given, rewards_PG):
    """With norms or without, also of outputs that are left out of the gradient because their advantage is 0."""
    learner = learner_of(tiny_policy, algorithm, **given)
    learner.rows = P
    found = one_pass(learner, samples_of(rollouts, rewards_PG))
    before = [p.grad.clone() for p in tiny_policy.parameters]
    plain, corrected = expected_moments(tiny_policy, rollouts, rewards_PG, ALL, found)
    scale = plain.trace_cov
    assert found.moments.signal2 == pytest.approx(corrected.signal2, abs=1e-4 * scale)
    assert found.moments.trace_cov == pytest.approx(corrected.trace_cov, abs=1e-4 * scale)
    assert abs(corrected.trace_cov - plain.trace_cov) > 0.01 * scale
    learner.rows = None
    one_pass(learner, samples_of(rollouts, rewards_PG))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(tiny_policy.parameters, before, strict=True))


def test_prompts_with_two_outputs_that_count_say_what_their_own_gradients_are(tiny_policy, rollouts):
    learner = learner_of(tiny_policy, "oblrpo_shrunk")
    learner.rows = P
    found = one_pass(learner, samples_of(rollouts, REWARDS, MASKED))
    _, corrected = expected_moments(tiny_policy, rollouts, REWARDS, MASKED, found)
    assert found.moments.spared == pytest.approx(corrected.spared, rel=1e-3)


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce"])
def test_weights_of_a_sampler_weigh_the_scores(tiny_policy, rollouts, algorithm):
    """Those of outputs that are not trained on, too; under RLOO these add nothing."""
    learner = learner_of(tiny_policy, algorithm, sampler_correction="untruncated")
    learner.rows = P
    own_SC, logps_SC = rollouts.sequences.own_SC, tiny_policy.logps(rollouts.sequences).token_logps_SC.detach()
    found = one_pass(learner, samples_of(replace(rollouts, sampler_logps_SC=own_SC * logps_SC * 1.1), REWARDS))
    rho_PG = (-0.1 * own_SC * logps_SC).sum(1).exp().view_as(REWARDS)
    assert float(rho_PG.std()) > 0.01
    assert not found.trained_S.all()
    _, corrected = expected_moments(tiny_policy, rollouts, REWARDS, ALL, found, rho_PG=rho_PG)
    assert found.moments.spared == pytest.approx(corrected.spared, rel=1e-3)
    _, of_trained = expected_moments(tiny_policy, rollouts, REWARDS, ALL, found)
    assert (of_trained.spared == pytest.approx(corrected.spared, rel=1e-2)) == (algorithm == "rloo")


def test_without_number_nothing_is_corrected(tiny_policy, rollouts):
    found = one_pass(learner_of(tiny_policy, "oblrpo"), samples_of(rollouts, REWARDS))
    plain, _ = expected_moments(tiny_policy, rollouts, REWARDS, ALL, found)
    assert found.moments.spared == 0
    assert found.moments.trace_cov == pytest.approx(plain.trace_cov, rel=1e-4)


@pytest.mark.parametrize("schedule", ["auto", "off"])
def test_later_updates_on_a_batch_enter_no_average(tiny_policy, rollouts, schedule):
    """They come from the same outputs: whatever their moments are, the averages are those of the first updates."""
    row = replace(ALGORITHMS["oblrpo_shrunk"], schedule=schedule)
    learner = learner_of(tiny_policy, row, optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=3)
    expected = MomentAverage(SCHEDULES[schedule].memory)
    for number, rewards_PG in enumerate((REWARDS, 1 - REWARDS), start=1):
        updates = learn(learner, samples_of(rollouts, rewards_PG), number).updates
        expected.add(updates[0].moments)
        assert len({update.moments for update in updates}) == 3
        assert [update.smoothed for update in updates] == [expected.moments] * 3
    assert learner.schedule.average.state_dict() == expected.state_dict()


def test_nothing_is_known_where_no_prompt_has_two_outputs_that_count(tiny_policy, rollouts):
    learner = learner_of(tiny_policy, "oblrpo_shrunk")
    learner.rows = P
    lone_PG = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    found = one_pass(learner, samples_of(rollouts, REWARDS, lone_PG))
    assert found.moments.spared == 0


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
