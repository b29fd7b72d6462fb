"""No signal, no step: rewards that say nothing leave the policy exactly as it was."""

import dataclasses

import pytest
import torch

from oblrpo.algorithms import ALGORITHMS
from oblrpo.diagnosis import Facts
from oblrpo.estimators import RULES, Prior
from oblrpo.rollout import sample
from oblrpo.settings import OptimConfig
from oblrpo.trainer import StepResult
from oblrpo.trainer.metrics import step_metrics
from oblrpo.trainer.monitors import Monitors
from oblrpo.trainer.optimizers import make_optimizer
from tests.trainer.learners import learner_of, sampled

P, G, LONGEST = 2, 2, 3


def weights(policy):
    return torch.cat([p.detach().clone().flatten() for p in policy.parameters])


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return sample(tiny_policy, ["a", "bc"], G, LONGEST, 1.0)


@pytest.mark.parametrize("schedule", RULES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rewards_of_zero_change_nothing(tiny_policy, rollouts, algorithm, schedule):
    """Even with a floor under the factor, weight decay asked for, and momentum from a step that had a signal."""
    row = dataclasses.replace(ALGORITHMS[algorithm], schedule=schedule)
    decaying = {"optimizer_args": {"weight_decay": 0.1}, "schedule_floor": 0.5, "lr": 1e-3}
    learner = learner_of(tiny_policy, row, optimizer=torch.optim.AdamW, **decaying)
    learner.learn(sampled(rollouts, torch.tensor([[1.0, 0.0], [0.0, 0.5]])))
    before, state = weights(tiny_policy), [each["exp_avg"].clone() for each in learner.optimizer.state.values()]
    assert any(each.any() for each in state)
    learner.baseline.prior = Prior()  # for oblr_shrunk, rewards of 0 after others are a signal
    for _ in range(3):
        (update,) = learner.learn(sampled(rollouts, torch.zeros(P, G)))
        assert (update.learning_rate, update.factor, update.gradient.norm2) == (0.0, 0.0, 0.0)
    assert torch.equal(weights(tiny_policy), before)
    assert all(map(torch.equal, state, (each["exp_avg"] for each in learner.optimizer.state.values())))


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_two_hundred_steps_leave_the_weights_and_the_rate_as_they_were(tiny_policy, rollouts, num_iterations):
    learner = learner_of(
        tiny_policy, "oblrpo_shrunk", optimizer=torch.optim.AdamW, lr=1e-3,
        num_iterations=num_iterations,
    )  # fmt: skip
    first = weights(tiny_policy)
    for _ in range(200 // num_iterations):
        learner.learn(sampled(rollouts, torch.zeros(P, G)))
    assert torch.equal(weights(tiny_policy), first)
    learned = learner.learn(sampled(rollouts, torch.tensor([[1.0, 0.0], [0.0, 1.0]])))
    assert learned[0].learning_rate == pytest.approx(1e-3)
    assert not torch.equal(weights(tiny_policy), first)


@pytest.mark.parametrize("schedule", ["off", "auto"])
@pytest.mark.parametrize("ratio", ["gspo", "dppo"])
def test_a_step_whose_later_updates_are_clipped_away_shows_the_rate_of_the_first(
    tiny_policy, rollouts, ratio, schedule
):
    row = dataclasses.replace(ALGORITHMS["rloo"], ratio=ratio, schedule=schedule)
    settings = {"num_iterations": 3, "ratio": ratio, "epsilon": 1e-9, "epsilon_high": 1e-9, "lr": 1e-2}
    learner = learner_of(tiny_policy, row, optimizer=torch.optim.AdamW, **settings)
    rewards_PG, valid_PG = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(P, G, dtype=torch.bool)
    updates = learner.learn(sampled(rollouts, rewards_PG))
    assert [update.gradient.norm2 > 0 for update in updates] == [True, False, False]
    found = step_metrics(1, StepResult(rollouts, rewards_PG, valid_PG, updates), 0)
    assert found["learning_rate"] == updates[0].learning_rate > 0
    assert found["lr_factor"] == updates[0].factor > 0
    assert found.get("step_kl") == updates[0].kl
    monitors = Monitors(Facts(measured_rate=schedule == "auto"))
    for step in range(1, 40):
        monitors.observe(found | {"step": step})
    assert not {"rate lost", "updates lost", "no gradient"} & set(monitors.watch.found)
    nothing = StepResult(rollouts, torch.zeros(P, G), valid_PG, learner.learn(sampled(rollouts, torch.zeros(P, G))))
    assert step_metrics(2, nothing, 0)["learning_rate"] == 0


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop"])
def test_weights_decay_only_where_somebody_asks_for_it(tiny_policy, name):
    plain = make_optimizer(OptimConfig(optimizer=name), tiny_policy.parameters)
    asked = make_optimizer(OptimConfig(optimizer=name, optimizer_args={"weight_decay": 0.1}), tiny_policy.parameters)
    assert (plain.defaults["weight_decay"], asked.defaults["weight_decay"]) == (0.0, 0.1)


def test_the_course_of_the_rate_follows_the_run(tiny_policy, rollouts):
    """A linear decay over 100 steps goes on in those without a gradient, the first among them."""
    learner = learner_of(tiny_policy, "rloo", lr=0.1, lr_scheduler_type="linear")
    rates = []
    for step in range(4):
        rewards_PG = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) if step % 2 else torch.zeros(P, G)
        rates.append(learner.learn(sampled(rollouts, rewards_PG))[0].learning_rate)
    assert rates == pytest.approx([0.0, 0.1 * 99 / 100, 0.0, 0.1 * 97 / 100])
