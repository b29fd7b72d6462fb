"""Outputs whose advantage is 0 do not go through the model for the gradient, and nothing else changes."""

import dataclasses

import pytest
import torch

from oblrpo.rollout import TransformersSampler
from oblrpo.settings import ScoresConfig
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from oblrpo.trainer.loop import step_metrics
from tests.trainer.learners import drawn, learn, learner_of, one_pass, samples_of

P, G, LONGEST = 5, 3, 4
AGREE = {"rloo", "mean", "grpo", "dr_grpo", "opo", "oblr", "eob", "vcpo", "oblr_lazy", "oblr_thrifty"}
"""Baselines under which a prompt whose outputs have earned the same gives no gradient, whatever they are weighed by."""


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return TransformersSampler(tiny_policy, features=True).sample(["a", "bc", "d", "efg", "h"], G, LONGEST, 1.0)


@pytest.fixture
def rewards_PG():
    """Of prompts 0, 2 and 4 all outputs have earned the same."""
    return torch.tensor([[0.3] * G, [1.0, 0.0, 0.0], [0.0] * G, [0.2, 0.7, 0.1], [1.0] * G])


def grads(policy):
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in policy.parameters])


def pass_of(policy, algorithm, rollouts, rewards_PG, valid_PG=None, look_steps=0, **settings):
    """The gradient and metrics of a step that leaves the policy where it is, and how many rows go through the model."""
    algorithm = ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm
    algorithm = dataclasses.replace(algorithm, schedule="off")
    learner = learner_of(
        policy, algorithm, lr=0.0, scores=ScoresConfig(look_steps=look_steps, ledger_steps=0), **settings
    )
    samples = drawn(learner, samples_of(rollouts, rewards_PG, valid_PG))
    gradients, rows, update = [], [], learner.update
    learner.update = lambda *given: gradients.append(grads(policy)) or update(*given)
    _ = policy.head  # which two rows find, once
    counting = policy.model.base_model.register_forward_hook(lambda *seen: rows.append(len(seen[2][0])))
    try:
        result = learner.learn(samples, 1)
    finally:
        counting.remove()
    return gradients[0], step_metrics(1, result, 0), sum(rows), result


def of_all(policy, result):
    """The gradient of the same coefficients, to which every output contributes."""
    batch = result.updates[0].gradient.batch
    advantages_PG = torch.where(batch.valid_PG, batch.rewards_PG - result.baseline_PG, 0)
    coef_PG = -advantages_PG * batch.weight_PG / batch.divisor_PG / batch.count_P.clamp(min=1)[:, None] / batch.prompts
    policy.model.zero_grad()
    (coef_PG.flatten() * policy.logps(batch.sequences).logps_S).sum().backward()
    return grads(policy)


@pytest.mark.parametrize("prompts_per_micro_batch", [0, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_is_that_of_all_outputs(tiny_policy, rollouts, rewards_PG, algorithm, prompts_per_micro_batch):
    """And the entropy; only those that pull go through the model, under every baseline."""
    settings = {"prompts_per_micro_batch": prompts_per_micro_batch}
    flat, metrics, rows, result = pass_of(tiny_policy, algorithm, rollouts, rewards_PG, **settings)
    expected = of_all(tiny_policy, result)
    torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    assert metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-6)
    entropy = tiny_policy.logps(rollouts.sequences).features.entropy_S.sum() / rollouts.sequences.lengths_S.sum()
    assert metrics["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    earned = float((rewards_PG != 0).double().mean())
    share = 2 / 5 if ALGORITHMS[algorithm].baseline in AGREE else earned if algorithm == "reinforce" else 1
    assert (rows, metrics["completions/trained_ratio"]) == (round(share * P * G), pytest.approx(share))


def test_where_nothing_pulls_the_step_has_no_gradient(tiny_policy, rollouts):
    """Prompts differ, but no output from its prompt's others."""
    rewards_PG = torch.tensor([1.0, 0.0, 0.3, 1.0, 0.0])[:, None].expand(P, G)
    flat, metrics, rows, result = pass_of(tiny_policy, "rloo", rollouts, rewards_PG)
    assert not flat.any()
    assert (metrics["learning_rate"], metrics["grad_norm"], rows) == (0, 0, 0)
    assert metrics["completions/trained_ratio"] == 0
    assert 0 < metrics["entropy"] < 6
    assert result.updates[0].gradient.ess_ratio == 1


def test_what_rounding_leaves_of_0_is_0(tiny_policy, rollouts, rewards_PG):
    """A weighted mean of equal rewards may be off in its last bit."""
    learner, samples = learner_of(tiny_policy, "oblrpo"), samples_of(rollouts, rewards_PG)
    for below, trained in ((torch.nextafter(rewards_PG, torch.tensor(-1.0)), False), (rewards_PG - 1e-5, True)):
        assert (rewards_PG != below).all()
        found = one_pass(learner, samples, 0, baseline_PG=below)
        assert found.trained_S.tolist() == [trained] * (P * G)
        assert (found.norm2 > 0) == (found.advantages_PG != 0).any() == trained


def test_masked_prompts_stay_out(tiny_policy, rollouts, rewards_PG):
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1], valid_PG[3, 0] = False, False
    flat, _, rows, result = pass_of(tiny_policy, "rloo", rollouts, rewards_PG, valid_PG)
    torch.testing.assert_close(flat, of_all(tiny_policy, result), rtol=1e-5, atol=1e-7)
    assert rows == 2
    assert result.updates[0].gradient.trained_S.nonzero().flatten().tolist() == [3 * G + 1, 3 * G + 2]


@pytest.mark.parametrize("ratio", ["sequence", "ppo"])
def test_later_updates_and_samplers_that_report_need_no_other_outputs(tiny_policy, rollouts, rewards_PG, ratio):
    """Advantages are those of the first update, and what an output of advantage 0 is weighed by changes nothing."""
    reported = dataclasses.replace(
        rollouts, sampler_logps_SC=tiny_policy.logps(rollouts.sequences).token_logps_SC.detach() * 1.1
    )
    algorithm = Algorithm("rloo", ratio=ratio)
    *_, rows, result = pass_of(
        tiny_policy, algorithm, reported, rewards_PG, num_iterations=3, sampler_correction="untruncated"
    )
    assert (rows, len(result.updates)) == (3 * 2 * G, 3)
    gradient = result.updates[-1].gradient
    pulls_S = gradient.trained_S
    assert pulls_S.view(P, G).all(1).tolist() == [False, True, False, True, False]
    assert (gradient.weighed.rho_S[~pulls_S] == 1).all()
    assert (gradient.weighed.rho_S[pulls_S] != 1).all()
    own_SC = rollouts.sequences.own_SC.bool()
    assert gradient.token_logps_SC[~pulls_S][own_SC[~pulls_S]].isnan().all()
    assert gradient.token_logps_SC[pulls_S].isfinite().all()
    assert result.further["sampling/importance_sampling_ratio/min"] > 1  # of those that went through


def test_a_look_takes_the_norms_of_all_outputs(tiny_policy, rollouts, rewards_PG):
    *_, rows, result = pass_of(tiny_policy, "rloo", rollouts, rewards_PG, look_steps=1)
    assert rows == P * G + 2 * G
    assert result.norm2_PG.isfinite().all()
    assert (result.norm2_PG > 0).all()


def test_moments_are_those_of_all_outputs(tiny_policy, rollouts, rewards_PG):
    """A prompt without a gradient is one of the P, with a squared norm of 0."""
    found = one_pass(learner_of(tiny_policy, "rloo"), samples_of(rollouts, rewards_PG))
    pulling = one_pass(
        learner_of(tiny_policy, "rloo"), samples_of(rollouts.at(torch.tensor([3, 4, 5, 9, 10, 11])), rewards_PG[[1, 3]])
    )
    norms = pulling.moments.signal2 + pulling.moments.trace_cov  # mean_i ||g_i||^2
    assert found.moments.n == P
    assert found.moments.signal2 + found.moments.trace_cov == pytest.approx(2 / P * norms, rel=1e-4)


def test_the_movement_is_that_of_all_outputs(tiny_policy, rollouts, rewards_PG):
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.SGD, lr=0.5, measured_one_in=1)
    change = learner.movement.watch(one_pass(learner, samples_of(rollouts, rewards_PG)).gradient)
    own_SC, before_SC = rollouts.sequences.own_SC, tiny_policy.logps(rollouts.sequences).token_logps_SC.detach()
    learner.optimizer.step()
    after_SC = tiny_policy.logps(rollouts.sequences).token_logps_SC.detach()
    assert (after_SC - before_SC).abs().max() > 1e-3
    torch.testing.assert_close(change(), (after_SC - before_SC) * own_SC)


def test_what_is_left_out_teaches_the_proxy_all_the_same(tiny_policy, rollouts, rewards_PG):
    learner = learner_of(tiny_policy, "oblrpo")
    learn(learner, samples_of(rollouts, rewards_PG))
    assert learner.baseline.calibrated.observed == P * G
