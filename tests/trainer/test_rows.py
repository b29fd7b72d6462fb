"""Tasks whose prompts can be counted: signal and noise of a batch that holds a good part of them."""

import pytest
import torch

from oblrpo import estimators
from oblrpo.rollout import sample
from oblrpo.scores import oracle
from oblrpo.settings import RolloutConfig, TrainConfig
from oblrpo.trainer.learner import own_norm2
from oblrpo.trainer.setup import make_learner
from tests.trainer.learners import gradient_of, learner_of, samples_of

P, G, LONGEST = 3, 3, 4
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.2], [0.2, 0.3, 1.0]])
MASKED = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return sample(tiny_policy, ["a", "bc", "d"], G, LONGEST, 1.0)


@pytest.mark.parametrize("algorithm", ["oblrpo", "oblrpo_shrunk"])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_prompts_own_gradients_are_those_of_loop_autograd(tiny_policy, rollouts, algorithm, micro_batch):
    """Mean over prompts of G / (G - 1) (||sum_j x_j||^2 - sum_j ||x_j||^2), one output of one prompt not counting."""
    learner = learner_of(tiny_policy, algorithm, prompts_per_micro_batch=micro_batch)
    learner.rows = P
    gradient = gradient_of(learner, samples_of(rollouts, REWARDS, MASKED), 1)
    batch, own2 = gradient.batch, own_norm2(gradient)
    rows = oracle.scores(tiny_policy.model, tiny_policy.logps(rollouts.sequences).logps_S)
    score_PGN = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double().view(P, G, -1)
    coef_PG = (batch.weight_PG / batch.divisor_PG) * (REWARDS - gradient.baseline_PG) / MASKED.sum(1, keepdim=True)
    part_PGN = torch.where(MASKED, coef_PG, 0)[..., None] * score_PGN
    count_P = MASKED.sum(1)
    norm2_P = part_PGN.sum(1).square().sum(-1)
    pairs_P = norm2_P - part_PGN.square().sum((1, 2))
    expected = float((pairs_P * count_P / (count_P - 1)).mean())
    assert own2 == pytest.approx(expected, rel=1e-4)
    plain = estimators.moments(norm2_P, part_PGN.sum(1).mean(0).square().sum())
    corrected = plain.of_rows(expected, P)
    scale = plain.trace_cov
    assert gradient.moments.signal2 == pytest.approx(corrected.signal2, abs=1e-4 * scale)
    assert gradient.moments.trace_cov == pytest.approx(corrected.trace_cov, abs=1e-4 * scale)
    assert abs(corrected.trace_cov - plain.trace_cov) > 0.01 * scale


@pytest.mark.parametrize(("algorithm", "rows"), [("oblrpo", None), ("rloo", P)])
def test_without_norms_or_number_nothing_is_corrected(tiny_policy, rollouts, algorithm, rows):
    """Under a baseline of rewards alone no score norms are taken."""
    learner = learner_of(tiny_policy, algorithm)
    learner.rows = rows
    gradient = gradient_of(learner, samples_of(rollouts, REWARDS), 1)
    assert gradient.moments.spared == 0
    assert gradient.moments == estimators.moments(gradient.group_norm2_P, gradient.norm2)


@pytest.mark.parametrize(("dynamic", "rows"), [(False, 12), (True, None)])
def test_prompts_chosen_by_what_they_earn_cannot_be_counted(tiny_policy, dynamic, rows):
    config = TrainConfig(rollout=RolloutConfig(dynamic_sampling=dynamic, num_generations=G))
    assert make_learner(tiny_policy, None, config, rows=12).rows == rows
