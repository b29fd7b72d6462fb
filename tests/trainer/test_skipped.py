"""An update whose gradient is not finite is skipped, and changes nothing: no weight, no state, no later step."""

import copy
import dataclasses
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape
from oblrpo.step import StepResult
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer.loop import step_metrics
from tests.trainer.learners import drawn, learn, learner_of, looking_at, samples_of

P, G, LONGEST = 3, 3, 4
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.1], [0.2, 0.3, 1.0]])


@pytest.fixture
def samples(tiny_policy):
    torch.manual_seed(1)
    return samples_of(sample(tiny_policy, ["a", "bc", "d"], G, LONGEST, 1.0), REWARDS)


def everything(learner):
    """Weights, and the state of optimizer, schedule, rate and baseline, as they are now."""
    weights = [p.detach().clone() for p in learner.policy.parameters]
    return weights, copy.deepcopy(learner.state_dict())


def same(first, second):
    return all(map(torch.equal, first[0], second[0])) and str(first[1]) == str(second[1])


def break_call(monkeypatch, owner, name, number):
    """Let call `number` (from 0) of a function return infinity."""
    whole, calls = getattr(owner, name), iter(range(1000))

    def broken(*args):
        result = whole(*args)
        return result * math.inf if next(calls) == number else result

    monkeypatch.setattr(owner, name, broken)


CAUSES = {"score norm": (ScoreTape, "gram"), "gradient": (estimators, "squared_norm")}


@pytest.mark.parametrize("what", CAUSES)
@pytest.mark.parametrize("prompts", [0, 1])
@pytest.mark.parametrize("looked", [None, [0, 2]])
@pytest.mark.parametrize("schedule", ["auto", "debiased"])
def test_a_skipped_step_is_as_if_it_had_never_been(tiny_policy, samples, monkeypatch, what, prompts, looked, schedule):
    """Between two whole steps, of two updates each: no prior, proxy, norm or look of before has changed."""
    settings = {"optimizer": torch.optim.AdamW, "lr": 1e-2, "num_iterations": 2, "prompts_per_micro_batch": prompts}
    row = dataclasses.replace(ALGORITHMS["oblrpo_shrunk"], schedule=schedule)
    learner, other = (learner_of(tiny_policy, row, **settings) for _ in range(2))
    if looked:
        looking_at(learner, looked), looking_at(other, looked)
    assert not learn(learner, samples).skipped
    before = everything(learner)
    assert before[1]["baseline"]["proxy"]["observed"] == (len(looked) if looked else P) * G
    with monkeypatch.context() as patched:
        break_call(patched, *CAUSES[what], 0)
        result = learn(learner, dataclasses.replace(samples, rewards_PG=REWARDS * 2), 2)
    assert (result.updates, result.skipped) == ((), what)
    assert same(everything(learner), before)
    assert all(p.grad is None for p in tiny_policy.parameters)
    learn(learner, samples, 3)
    after = everything(learner)
    assert not same(after, before)
    with torch.no_grad():
        for p, kept in zip(tiny_policy.parameters, before[0], strict=True):
            p.copy_(kept)
    other.load_state_dict(copy.deepcopy(before[1]), "run")
    learn(other, samples, 3)
    assert same(everything(other), after)


def test_a_second_update_that_is_not_finite_leaves_the_first(tiny_policy, samples, monkeypatch):
    start = [p.detach().clone() for p in tiny_policy.parameters]
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=1)
    learn(learner, samples)
    once = everything(learner)
    with torch.no_grad():
        for p, kept in zip(tiny_policy.parameters, start, strict=True):
            p.copy_(kept)
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=3)
    break_call(monkeypatch, *CAUSES["gradient"], 1)
    result = learn(learner, samples)
    assert len(result.updates) == 1
    assert result.skipped == "gradient"
    assert same(everything(learner), once)
    metrics = step_metrics(1, result, 9)
    assert metrics["skipped"] == 1
    assert metrics["learning_rate"] > 0
    assert not learn(learner, samples).skipped


def test_the_metrics_of_a_skipped_step(tiny_policy, samples):
    metrics = step_metrics(1, StepResult(drawn(learner_of(tiny_policy, "rloo"), samples), skipped="score norm"), 9)
    assert (metrics["skipped"], metrics["learning_rate"]) == (1, 0)
    assert metrics["reward"] == pytest.approx(float(REWARDS.mean()))
    ends = [metrics[f"reward_{name}"] for name in ("min", "max", "iqr")]
    assert ends == pytest.approx([0, 1, 0.9])
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["frac_prompts_masked"])
