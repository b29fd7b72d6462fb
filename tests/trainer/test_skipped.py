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
from oblrpo.trainer.loop import step_metrics
from tests.trainer.learners import learner_of, samples_of

P, G, LONGEST = 3, 3, 4
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.1], [0.2, 0.3, 1.0]])


@pytest.fixture
def samples(tiny_policy):
    torch.manual_seed(1)
    return samples_of(sample(tiny_policy, ["a", "bc", "d"], G, LONGEST, 1.0), REWARDS)


def everything(learner):
    """Weights, and the state of optimizer, schedule, rate and baseline, as they are now."""
    weights = [p.detach().clone() for p in learner.core.policy.parameters]
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
def test_a_skipped_step_is_as_if_it_had_never_been(tiny_policy, samples, monkeypatch, what, prompts, last, schedule):
    """Broken in the last of its micro-batches, between two whole steps, of two updates each."""
    settings = {"optimizer": torch.optim.AdamW, "lr": 1e-2, "num_iterations": 2, "prompts_per_micro_batch": prompts}
    row = dataclasses.replace(ALGORITHMS["oblrpo_shrunk"], schedule=schedule)
    learner = learner_of(tiny_policy, row, **settings)
    assert not learner.learn(samples).skipped
    before = everything(learner)
    with monkeypatch.context() as patched:
        break_call(patched, CAUSES[what][0], last, CAUSES[what][1])
        result = learner.learn(dataclasses.replace(samples, rewards_PG=REWARDS * 2))
    assert (result.updates, result.skipped) == ([], what)
    assert same(everything(learner), before)
    assert all(p.grad is None for p in tiny_policy.parameters)
    learner.learn(samples)
    after = everything(learner)
    with torch.no_grad():
        for p, kept in zip(tiny_policy.parameters, before[0], strict=True):
            p.copy_(kept)
    other = learner_of(tiny_policy, row, **settings)
    other.load_state_dict(copy.deepcopy(before[1]), "run")
    other.learn(samples)
    assert same(everything(other), after)


def test_a_second_update_that_is_not_finite_leaves_the_first(tiny_policy, samples, monkeypatch):
    start = [p.detach().clone() for p in tiny_policy.parameters]
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=1)
    learner.learn(samples)
    once = everything(learner)
    with torch.no_grad():
        for p, kept in zip(tiny_policy.parameters, start, strict=True):
            p.copy_(kept)
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=3)
    break_call(monkeypatch, "accumulate", 1, infinite)
    result = learner.learn(samples)
    assert len(result.updates) == 1
    assert result.skipped == "gradient of a prompt"
    assert same(everything(learner), once)
    metrics = step_metrics(1, result, 9)
    assert metrics["skipped"] == 1
    assert metrics["learning_rate"] > 0
    assert not learner.learn(samples).skipped


def test_the_metrics_of_a_skipped_step(samples):
    metrics = step_metrics(1, StepResult(samples, [], "score norm"), 9)
    assert (metrics["skipped"], metrics["learning_rate"]) == (1, 0)
    assert metrics["reward"] == pytest.approx(float(REWARDS.mean()))
    ends = [metrics[f"reward_{name}"] for name in ("min", "max", "iqr")]
    assert ends == pytest.approx([0, 1, 0.9])
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["frac_prompts_masked"])
