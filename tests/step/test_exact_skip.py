"""Outputs whose advantage is 0 do not go through the model a second time, and nothing else changes."""

import dataclasses
import math

import pytest
import torch

from oblrpo.estimators import BASELINES
from oblrpo.policy.micro_batches import MicroBatches
from oblrpo.rollout import TransformersSampler
from oblrpo.settings import ScoresConfig
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer import StepResult
from oblrpo.trainer.loop import step_metrics
from tests.trainer.learners import gradient_of, learner_of, samples_of

P, G, LONGEST = 5, 3, 4
UNWEIGHTED = [name for name, row in ALGORITHMS.items() if "norm2_PG" not in BASELINES[row.baseline].needs]
AGREE = {"rloo", "mean", "grpo", "dr_grpo", "opo"}
"""Baselines under which a prompt whose outputs have earned the same gives no gradient."""


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return TransformersSampler(tiny_policy, entropy=True).sample(["a", "bc", "d", "efg", "h"], G, LONGEST, 1.0)


@pytest.fixture
def rewards_PG():
    """Of prompts 0, 2 and 4 all outputs have earned the same."""
    return torch.tensor([[0.3] * G, [1.0, 0.0, 0.0], [0.0] * G, [0.2, 0.7, 0.1], [1.0] * G])


def pass_of(policy, algorithm, rollouts, rewards_PG, valid_PG=None, **settings):
    """Gradient, moments and metrics of a step, and how many rows went through the model."""
    learner = learner_of(policy, algorithm, schedule="off", **settings)
    samples = samples_of(rollouts, rewards_PG, valid_PG)
    policy.logps(rollouts.sequences)  # which looks, once, how the model's head can be used
    rows: list[int] = []
    counting = policy.model.base_model.register_forward_hook(lambda *seen: rows.append(len(seen[2][0])))
    try:
        gradient = gradient_of(learner, samples, 1)
    finally:
        counting.remove()
    flat = torch.cat([p.grad.flatten() for p in policy.parameters])
    return flat, step_metrics(1, StepResult(samples, [learner.update(gradient)]), 0), sum(rows), gradient


def without_schedule(name):
    return dataclasses.replace(ALGORITHMS[name], schedule="off")


@pytest.mark.parametrize("prompts_per_micro_batch", [0, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_moments_and_metrics_are_the_same(
    tiny_policy, rollouts, rewards_PG, algorithm, prompts_per_micro_batch
):
    found = {}
    before = [p.detach().clone() for p in tiny_policy.parameters]
    for train_on in ("all", "exact"):
        for p, kept in zip(tiny_policy.parameters, before, strict=True):
            p.data.copy_(kept)
        settings = {"train_on": train_on, "prompts_per_micro_batch": prompts_per_micro_batch}
        found[train_on] = pass_of(tiny_policy, without_schedule(algorithm), rollouts, rewards_PG, **settings)
    (flat, metrics, rows, whole), (skipped, others, fewer, part) = found["all"], found["exact"]
    torch.testing.assert_close(skipped, flat, rtol=1e-6, atol=1e-6 * flat.abs().max().item())
    share = others.pop("completions/trained_ratio")
    assert metrics.pop("completions/trained_ratio") == 1
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6, nan_ok=True)
    torch.testing.assert_close(part.baseline_PG, whole.baseline_PG, atol=1e-6, rtol=1e-6)
    assert rows == P * G
    earned = float((rewards_PG != 0).double().mean())
    expected = 2 / 5 if ALGORITHMS[algorithm].baseline in AGREE else earned if algorithm == "reinforce" else 1
    if algorithm in UNWEIGHTED:
        assert (fewer, share) == (round(expected * P * G), pytest.approx(expected))
    else:
        assert (fewer, share) == (P * G, 1)


def test_where_nothing_pulls_the_step_has_no_gradient(tiny_policy, rollouts):
    flat, metrics, rows, gradient = pass_of(tiny_policy, without_schedule("rloo"), rollouts, torch.ones(P, G))
    assert not flat.any()
    assert (metrics["learning_rate"], gradient.norm2, rows) == (0, 0, 1)
    assert math.isfinite(metrics["entropy"])


def test_masked_prompts_stay_out(tiny_policy, rollouts, rewards_PG):
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1], valid_PG[3, 0] = False, False
    found = [
        pass_of(tiny_policy, without_schedule("rloo"), rollouts, rewards_PG, valid_PG, train_on=train_on, lr=0.0)
        for train_on in ("all", "exact")
    ]
    torch.testing.assert_close(found[1][0], found[0][0])
    assert (found[0][2], found[1][2]) == (P * G, 2)


def test_the_entropy_of_what_is_left_out_is_that_of_the_draws_or_of_a_forward(tiny_policy, rollouts, rewards_PG):
    """A sampler that does not report it costs a forward, no backward."""
    unreported = dataclasses.replace(rollouts, entropy_S=None)
    reported, forwarded, plain = (
        pass_of(tiny_policy, without_schedule("rloo"), each, rewards_PG, lr=0.0, train_on=train_on)
        for each, train_on in ((rollouts, "exact"), (unreported, "exact"), (rollouts, "all"))
    )
    assert reported[1]["entropy"] == pytest.approx(plain[1]["entropy"], rel=1e-6)
    assert forwarded[1]["entropy"] == pytest.approx(plain[1]["entropy"], rel=1e-6)
    assert (reported[2], forwarded[2]) == (2 * G, P * G)


@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"scores": None}])
def test_all_go_through_where_more_than_the_gradient_is_needed(tiny_policy, rollouts, rewards_PG, settings):
    """Importance weights in a second update, or what the sampler reports."""
    if "scores" in settings:
        settings, rollouts = {}, dataclasses.replace(rollouts, sampler_logps_SC=torch.zeros_like(
            rollouts.sequences.own_SC, dtype=torch.float32
        ))  # fmt: skip
        settings["sampler_correction"] = "measured"
    *_, rows, gradient = pass_of(tiny_policy, without_schedule("rloo"), rollouts, rewards_PG, **settings)
    assert (rows, gradient.trained_share) == (P * G, 1)


def test_norms_are_those_of_all_outputs_in_a_step_that_compares_them(tiny_policy, rollouts, rewards_PG):
    learner = learner_of(tiny_policy, without_schedule("rloo"), schedule="off")
    samples = samples_of(rollouts, rewards_PG)
    assert gradient_of(learner, samples, 1).trained_share == pytest.approx(2 / 5)
    assert gradient_of(learner, samples, 10).trained_share == 1


def test_the_movement_is_that_of_all_outputs(tiny_policy, rollouts, rewards_PG):
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.SGD, lr=0.5, measured_one_in=1)
    change = learner.core.movement.watch(gradient_of(learner, samples_of(rollouts, rewards_PG), 1))
    own_SC, before_SC = rollouts.sequences.own_SC, tiny_policy.logps(rollouts.sequences).token_logps_SC.detach()
    learner.core.optimizer.step()
    after_SC = tiny_policy.logps(rollouts.sequences).token_logps_SC.detach()
    torch.testing.assert_close(change(), (after_SC - before_SC) * own_SC)


def test_micro_batches_of_some_outputs(tiny_policy, rollouts, rewards_PG):
    """Prompts of which three, then one, of the outputs are chosen; the mean is over all three all the same."""
    batch = learner_of(tiny_policy, "rloo").core.batch(samples_of(rollouts, rewards_PG))
    chosen_PG = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]).bool()
    parts = list(batch.parts(MicroBatches(prompts=2), chosen_PG))
    assert [part.index_P.tolist() for part in parts] == [[0, 1], [3, 4]]
    assert [part.shape for part in parts] == [(4, 1), (2, 3)]
    assert [part.groups for part in parts] == [[3, 1], 3]
    assert parts[0].index_S.tolist() == [0, 1, 2, 4]
    assert parts[0].rewards_PG.flatten().tolist() == rewards_PG.flatten()[[0, 1, 2, 4]].tolist()
    ids_SC = batch.sequences.at(torch.tensor([0, 1, 2, 4])).completion_SC
    assert torch.equal(parts[0].sequences.completion_SC, ids_SC)
    assert parts[0].factor_PG(torch.ones(4, 1)).flatten().tolist() == pytest.approx([-1 / P / G] * 4)
    (whole,) = batch.parts(MicroBatches(prompts=4), chosen_PG)
    assert whole.index_P.tolist() == [0, 3, 4, 1]  # those with more outputs first
    assert whole.groups == [3, 3, 3, 1]
    assert not list(batch.parts(MicroBatches(), chosen_PG & False))


@pytest.mark.parametrize("method", ["auto", "two_pass"])
def test_outputs_that_earned_nothing_are_skipped_by_every_method(tiny_policy, rollouts, rewards_PG, method):
    """Without a baseline the outputs that earned nothing are, which leaves prompts of different sizes."""
    found = {}
    for train_on in ("all", "exact"):
        scores = ScoresConfig(score_method=method, ledger_steps=0)
        learner = learner_of(tiny_policy, "reinforce", scores=scores, train_on=train_on)
        gradient = gradient_of(learner, samples_of(rollouts, rewards_PG), 1)
        grads = [p.grad.clone() for p in tiny_policy.parameters]
        found[train_on] = [*grads, gradient.group_norm2_P, torch.tensor([gradient.moments.signal2, gradient.norm2])]
        assert len(gradient.parts) == 1
    assert gradient.trained_share < 1
    for one, other in zip(found["all"], found["exact"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6 * float(one.abs().max()))
