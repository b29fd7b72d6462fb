"""An update whose gradient is not finite is skipped, and changes nothing: no weight, no state, no later step."""

import copy
import dataclasses
import math

import pytest
import torch

from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer import StepResult
from oblrpo.trainer.metrics import step_metrics
from tests.trainer.learners import learner_of, sampled

P, G, LONGEST = 3, 3, 4
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 1.0]])


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return sample(tiny_policy, ["a", "bc", "d"], G, LONGEST, 1.0)


def everything(learner):
    """Weights, and the state of optimizer, schedule, rate and baseline, as they are now."""
    weights = [p.detach().clone() for p in learner.policy.parameters]
    return weights, copy.deepcopy(learner.state_dict())


def same(first, second):
    return all(map(torch.equal, first[0], second[0])) and str(first[1]) == str(second[1])


def break_call(monkeypatch, method, number, spoil):
    """Let call `number` (from 0) of a method of the tape return what `spoil` makes of its result."""
    whole, calls = getattr(ScoreTape, method), iter(range(1000))

    def broken(tape, *args, **kwargs):
        result = whole(tape, *args, **kwargs)
        return spoil(tape, result) if next(calls) == number else result

    monkeypatch.setattr(ScoreTape, method, broken)


def infinite(tape, result):
    return torch.full_like(result, math.inf)


def too_large_to_square(tape, result):
    for p in tape.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0).add_(1e25)
    return result


CAUSES = {
    "score norm": ("norm2", infinite),
    "gradient of a prompt": ("accumulate", infinite),
    "gradient": ("accumulate", too_large_to_square),
}


@pytest.mark.parametrize("what", CAUSES)
@pytest.mark.parametrize(("prompts", "last"), [(0, 0), (1, P - 1)])
@pytest.mark.parametrize("schedule", ["auto", "debiased"])
def test_a_skipped_step_is_as_if_it_had_never_been(tiny_policy, rollouts, monkeypatch, what, prompts, last, schedule):
    """Broken in the last of its micro-batches, between two whole steps, of two updates each."""
    settings = {"optimizer": torch.optim.AdamW, "lr": 1e-2, "num_iterations": 2, "prompts_per_micro_batch": prompts}
    row = dataclasses.replace(ALGORITHMS["oblrpo_shrunk"], schedule=schedule)
    learner = learner_of(tiny_policy, row, **settings)
    learner.learn(sampled(rollouts, REWARDS))
    assert not learner.skipped
    before = everything(learner)
    with monkeypatch.context() as patched:
        break_call(patched, CAUSES[what][0], last, CAUSES[what][1])
        assert learner.learn(sampled(rollouts, REWARDS * 2)) == []
    assert learner.skipped == what
    assert same(everything(learner), before)
    assert all(p.grad is None for p in tiny_policy.parameters)
    learner.learn(sampled(rollouts, REWARDS))
    after = everything(learner)
    with torch.no_grad():
        for p, kept in zip(tiny_policy.parameters, before[0], strict=True):
            p.copy_(kept)
    other = learner_of(tiny_policy, row, **settings)
    other.load_state_dict(copy.deepcopy(before[1]), "run")
    other.learn(sampled(rollouts, REWARDS))
    assert same(everything(other), after)


def test_a_second_update_that_is_not_finite_leaves_the_first(tiny_policy, rollouts, monkeypatch):
    start = [p.detach().clone() for p in tiny_policy.parameters]
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=1)
    learner.learn(sampled(rollouts, REWARDS))
    once = everything(learner)
    with torch.no_grad():
        for p, kept in zip(tiny_policy.parameters, start, strict=True):
            p.copy_(kept)
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=3)
    break_call(monkeypatch, "accumulate", 1, infinite)
    updates = learner.learn(sampled(rollouts, REWARDS))
    assert len(updates) == 1
    assert learner.skipped == "gradient of a prompt"
    assert same(everything(learner), once)
    metrics = step_metrics(
        1, StepResult(rollouts, REWARDS, torch.ones(P, G, dtype=torch.bool), updates, learner.skipped), 9
    )
    assert metrics["skipped"] == 1
    assert metrics["learning_rate"] > 0
    learner.learn(sampled(rollouts, REWARDS))
    assert not learner.skipped


def test_the_metrics_of_a_skipped_step(rollouts):
    everywhere_PG = torch.ones(P, G, dtype=torch.bool)
    metrics = step_metrics(1, StepResult(rollouts, REWARDS, everywhere_PG, [], "score norm"), 9)
    assert (metrics["skipped"], metrics["learning_rate"]) == (1, 0)
    assert metrics["reward"] == pytest.approx(float(REWARDS.mean()))
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["frac_prompts_masked"])
