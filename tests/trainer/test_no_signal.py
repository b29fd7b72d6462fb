"""No signal, no step: rewards that say nothing leave the policy exactly as it was."""

import copy
import dataclasses

import pytest
import torch

from oblrpo import estimators
from oblrpo.diagnosis import Facts
from oblrpo.estimators import SCHEDULES
from oblrpo.rollout import sample
from oblrpo.settings import OptimConfig
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer.loop import Monitors, step_metrics
from oblrpo.trainer.optimizers import make_optimizer
from tests.trainer.learners import learn, learner_of, samples_of

P, G, LONGEST = 2, 2, 3


def weights(policy):
    return torch.cat([p.detach().clone().flatten() for p in policy.parameters])


@pytest.fixture
def rollouts(tiny_policy):
    torch.manual_seed(1)
    return sample(tiny_policy, ["a", "bc"], G, LONGEST, 1.0)


def everything(learner):
    """Weights and all that the next step depends on, but the scheduler, which counts updates that are left out, too."""
    state = copy.deepcopy(learner.state_dict())
    state.pop("scheduler", None)
    for group in state["optimizer"]["param_groups"]:
        del group["lr"]
    return weights(learner.policy), str(state)


def same(first, second):
    return torch.equal(first[0], second[0]) and first[1] == second[1]


@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [*((name, "auto") for name in ALGORITHMS), *(("rloo", name) for name in SCHEDULES if name != "auto")],
)
def test_rewards_of_which_none_differs_change_nothing(tiny_policy, rollouts, algorithm, schedule):
    """Even with a floor under the factor, weight decay set, momentum from a step that had a signal, and a prior
    that remembers other rewards, to which a constant is a reward of its own."""
    row = dataclasses.replace(ALGORITHMS[algorithm], schedule=schedule)
    decaying = {"optimizer_args": {"weight_decay": 0.1}, "schedule_floor": 0.5, "lr": 1e-3}
    learner = learner_of(tiny_policy, row, optimizer=torch.optim.AdamW, num_iterations=2, **decaying)
    learn(learner, samples_of(rollouts, torch.tensor([[1.0, 0.0], [0.0, 0.5]])))
    assert any(each["exp_avg"].any() for each in learner.optimizer.state.values())
    before = everything(learner)
    rounded_PG = torch.tensor([[1.0, 1.0 + 1e-7], [1.0 - 1e-7, 1.0]], dtype=torch.float64)
    for rewards_PG in (*(torch.full((P, G), constant) for constant in (0.0, 1.0, 0.37, -1.0)), 0.37 * rounded_PG):
        result = learn(learner, samples_of(rollouts, rewards_PG))
        assert (result.updates, result.skipped, result.without_signal) == ((), "", True)
        assert same(everything(learner), before)
        assert all(p.grad is None for p in tiny_policy.parameters)
    last = learn(learner, samples_of(rollouts, torch.tensor([[0.37, 0.37], [0.37, 0.371]])))
    assert last.updates
    assert not last.without_signal
    assert not same(everything(learner), before)


def test_the_entropy_is_that_of_the_tokens(tiny_policy, rollouts):
    """The same whether there is an update or not."""
    learner = learner_of(tiny_policy, "rloo", optimizer=torch.optim.SGD, lr=1e-9)
    out = tiny_policy.logps(rollouts.sequences)
    entropy = float(out.features.entropy_S.sum() / rollouts.sequences.lengths_S.sum())
    for rewards_PG in (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(P, G)):
        result = learn(learner, samples_of(rollouts, rewards_PG))
        assert step_metrics(1, result, 9)["entropy"] == pytest.approx(entropy, rel=1e-5)


def test_what_a_step_without_information_reports(tiny_policy, rollouts):
    learner = learner_of(tiny_policy, "oblrpo_shrunk")
    for rewards_PG, skipped in ((torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.0), (torch.full((P, G), 0.37), 1.0)):
        result = learn(learner, samples_of(rollouts, rewards_PG))
        found = step_metrics(1, result, 0)
        assert found["skipped"] == skipped
        if skipped:
            nothing = ("learning_rate", "lr_factor", "grad_norm", "snr", "n_snr", "signal2", "trace_cov")
            assert [found[name] for name in nothing] == [0.0] * len(nothing)
            assert 0 < found["entropy"] < 6
            assert found["frac_prompts_masked"] == 0


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_two_hundred_steps_leave_the_weights_and_the_rate_as_they_were(tiny_policy, rollouts, num_iterations):
    settings = {"optimizer": torch.optim.AdamW, "lr": 1e-4, "num_iterations": num_iterations}
    learner = learner_of(tiny_policy, "oblrpo_shrunk", **settings)
    first = weights(tiny_policy)
    for _ in range(200 // num_iterations):
        learn(learner, samples_of(rollouts, torch.zeros(P, G)))
    assert torch.equal(weights(tiny_policy), first)
    signal, found = samples_of(rollouts, torch.tensor([[1.0, 0.0], [0.0, 1.0]])), []
    for each in (learner, learner_of(tiny_policy, "oblrpo_shrunk", **settings)):  # and one that saw none of them
        torch.nn.utils.vector_to_parameters(first.clone(), tiny_policy.parameters)
        found.append(([update.learning_rate for update in learn(each, signal).updates], weights(tiny_policy)))
        assert not torch.equal(weights(tiny_policy), first)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("constant", [0.0, 0.37])
def test_rewards_that_come_back_find_the_rate_that_they_left(tiny_policy, rollouts, constant):
    """Thirty steps of a service that is down, in a run whose rate has been found."""
    learner = learner_of(tiny_policy, "oblrpo_shrunk", optimizer=torch.optim.AdamW, lr=1e-3)
    rewards_PG = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for _ in range(8):
        (last,) = learn(learner, samples_of(rollouts, rewards_PG)).updates
    for _ in range(30):
        learn(learner, samples_of(rollouts, torch.full((P, G), constant)))
    (back,) = learn(learner, samples_of(rollouts, rewards_PG)).updates
    assert 0.5 < back.learning_rate / last.learning_rate < 2


@pytest.mark.parametrize("schedule", ["off", "auto"])
@pytest.mark.parametrize("ratio", ["gspo", "dppo"])
def test_a_step_whose_later_updates_are_clipped_away_shows_the_rate_of_the_first(
    tiny_policy, rollouts, ratio, schedule
):
    row = dataclasses.replace(ALGORITHMS["rloo"], ratio=ratio, schedule=schedule)
    settings = {"num_iterations": 3, "ratio": ratio, "epsilon": 1e-9, "epsilon_high": 1e-9, "lr": 1e-2}
    learner = learner_of(tiny_policy, row, optimizer=torch.optim.AdamW, **settings)
    result = learn(learner, samples_of(rollouts, torch.tensor([[1.0, 0.0], [0.0, 1.0]])))
    updates = result.updates
    assert [update.gradient.norm2 > 0 for update in updates] == [True, False, False]
    found = step_metrics(1, result, 0)
    assert found["learning_rate"] == updates[0].learning_rate > 0
    assert found["lr_factor"] == updates[0].factor > 0
    assert found.get("step_kl") == updates[0].kl
    monitors = Monitors(Facts(measured_rate=schedule == "auto"))
    for step in range(1, 40):
        monitors.observe(found | {"step": step})
    assert not {"rate collapsed", "updates lost", "no gradient"} & set(monitors.watch.found)
    nothing = learn(learner, samples_of(rollouts, torch.zeros(P, G)))
    assert step_metrics(2, nothing, 0)["learning_rate"] == 0


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop"])
def test_weights_decay_only_where_somebody_sets_it(tiny_policy, name):
    plain = make_optimizer(OptimConfig(optimizer=name), tiny_policy.parameters)
    decaying = make_optimizer(OptimConfig(optimizer=name, optimizer_args={"weight_decay": 0.1}), tiny_policy.parameters)
    assert (plain.defaults["weight_decay"], decaying.defaults["weight_decay"]) == (0.0, 0.1)


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_the_course_of_the_rate_follows_the_run(tiny_policy, rollouts, num_iterations, monkeypatch):
    """A linear decay over 100 steps goes on in those without an update, whatever the cause, the first among them."""
    learner = learner_of(
        tiny_policy, "rloo", lr=0.1, lr_scheduler_type="linear", num_iterations=num_iterations, ratio="sequence"
    )
    differ, lone = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
    steps = {"equal": (torch.zeros(P, G), None), "one prompt": (differ, lone), "NaN": (differ, None)}
    rates, each = [], {name: samples_of(rollouts, *given) for name, given in steps.items()}
    for name in ("equal", "", "one prompt", "", "NaN", ""):
        with monkeypatch.context() as patched:
            if name == "NaN":
                patched.setattr(estimators, "squared_norm", lambda parameters: torch.nan)
            result = learn(learner, each.get(name) or samples_of(rollouts, differ))
        rates.append([update.learning_rate for update in result.updates])
    course = [0.1 * (1 - update / (100 * num_iterations)) for update in range(6 * num_iterations)]
    by_step = [course[start : start + num_iterations] for start in range(0, len(course), num_iterations)]
    assert rates[::2] == [[], [], []]
    for found, expected in zip(rates[1::2], by_step[1::2], strict=True):
        assert found == pytest.approx(expected)
