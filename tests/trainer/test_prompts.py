"""Which prompts a step learns from: dynamic sampling, or the order of the task."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.rollout import TransformersSampler, join
from oblrpo.settings import RolloutConfig, TrainConfig
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.tasks import DataTask, Problem
from oblrpo.trainer.check import check
from oblrpo.trainer.loop import step_metrics
from oblrpo.trainer.task import Prompts
from tests.trainer.learners import learner_of

G, LONGEST = 3, 4
PROBLEMS = [Problem(text, "") for text in ("a", "bcd", "e", "fg", "h", "i")]


def config_of(**settings):
    return TrainConfig(rollout=RolloutConfig(num_generations=G, max_completion_length=LONGEST, **settings))


def data_task(problems=PROBLEMS):
    return DataTask("data", problems, heldout=[Problem("other", "")])


class Rewards:
    """Gives prompts rewards by their text; None: no reward."""

    def __init__(self, of):
        self.of, self.calls = of, []

    def __call__(self, problems, completions, ids):
        self.calls.append([problem.prompt for problem in problems])
        rewards = [self.of.get(problem.prompt, [0.0] * G) for problem in problems]
        return [[value or 0.0 for value in row] for row in rewards], [[v is not None for v in row] for row in rewards]


def learner_for(policy, rewards, algorithm="rloo", **settings):
    row = dataclasses.replace(ALGORITHMS[algorithm], schedule="off")
    settings = {"num_generations": G, "max_completion_length": LONGEST} | settings
    return learner_of(policy, row, lr=0.0, rewards=rewards, **settings)


def test_rows_of_several_rollouts_come_together_as_they_were(tiny_policy):
    torch.manual_seed(0)
    sampler = TransformersSampler(tiny_policy, True, True)
    first, second = (sampler.sample(prompts, 2, longest, 1.0) for prompts, longest in ((["a", "bcd"], 2), (["ef"], 9)))
    whole = join([first, second])
    assert whole.completions == first.completions + second.completions
    back = whole.at(torch.tensor([4, 5]))
    for name in ("ids_ST", "mask_ST", "own_ST"):
        assert torch.equal(getattr(back.sequences, name), getattr(second.sequences, name))
    assert torch.equal(back.sampler_logps_SC, second.sampler_logps_SC)
    for name, values in vars(second.features).items():
        assert torch.equal(getattr(back.features, name), values)
    swapped = whole.at(torch.tensor([3, 0]))
    assert swapped.completions == [first.completions[3], first.completions[0]]
    assert torch.equal(swapped.sequences.lengths_S, first.sequences.lengths_S[[3, 0]])
    logps = tiny_policy.logps(whole.sequences).logps_S
    torch.testing.assert_close(logps[:4], tiny_policy.logps(first.sequences).logps_S)


def test_dynamic_sampling_goes_on_until_enough_prompts_differ(tiny_policy):
    task, config = data_task(), config_of(prompts_per_step=2, dynamic_sampling=9)
    order = [problem.prompt for step in (1, 2, 3) for problem in task.train_batch(step, 2)]
    last = next(place for place in (5, 4) if order[place] not in order[1:3])  # the third batch is of another epoch
    rewards = Rewards({order[1]: [1.0, 0.0, 0.0], order[2]: [1.0, 1.0, None], order[last]: [0.2, None, 0.3]})
    learner = learner_for(tiny_policy, rewards, prompts_per_step=2)
    prompts = Prompts(task, config)
    problems, done = prompts.step(learner, 1)
    assert rewards.calls == [order[:2], order[2:4], order[4:]]
    assert [problem.prompt for problem in problems] == [order[1], order[last]]
    assert done.samples.rewards_PG[0].tolist() == [1.0, 0.0, 0.0]
    assert done.samples.valid_PG[1].tolist() == [True, False, True]
    assert len(done.samples.rollouts.completions) == 2 * G
    metrics = step_metrics(1, done, 0)
    assert metrics["num_gen_batches"] == 3
    known = done.all_samples.rewards_PG[done.all_samples.valid_PG]
    assert metrics["reward"] == pytest.approx(float(known.mean()))
    assert len(known) > 5 * G - 3
    agree = [text not in {order[1], order[last]} for text in order]
    assert metrics["frac_reward_zero_std"] == pytest.approx(sum(agree) / len(agree))
    again = Prompts(task, config)
    again.load_state_dict(prompts.state_dict())
    again.step(learner, 2)
    assert rewards.calls[3] == [problem.prompt for problem in task.train_batch(4, 2)]


@pytest.mark.parametrize(("differ", "rounds"), [(2, 1), (1, 2)])
def test_no_more_is_sampled_than_it_takes(tiny_policy, differ, rounds):
    """A first batch whose prompts all differ is enough; all of the second differ."""
    task = data_task()
    order = [problem.prompt for step in (1, 2) for problem in task.train_batch(step, 2)]
    rewards = Rewards({prompt: [1.0, 0.0, 0.0] for prompt in (*order[:differ], *order[2:])})
    prompts = Prompts(task, config_of(prompts_per_step=2, dynamic_sampling=9))
    _, done = prompts.step(learner_for(tiny_policy, rewards, prompts_per_step=2), 1)
    assert (len(rewards.calls), done.rounds, prompts.batches) == (rounds, rounds, rounds)


def test_after_the_last_round_prompts_that_agree_fill_the_step(tiny_policy):
    task = data_task()
    order = [problem.prompt for step in (1, 2) for problem in task.train_batch(step, 2)]
    rewards = Rewards({order[3]: [1.0, 0.0, 0.0]})
    prompts = Prompts(task, config_of(prompts_per_step=2, dynamic_sampling=2))
    problems, done = prompts.step(learner_for(tiny_policy, rewards, prompts_per_step=2), 1)
    assert [problem.prompt for problem in problems] == [order[3], order[0]]
    assert (len(rewards.calls), done.rounds) == (2, 2)


def test_the_order_of_the_task_is_the_default():
    steps = []
    learner = SimpleNamespace(step=lambda problems, number: steps.append((problems, number)))
    prompts, task = Prompts(data_task(), config_of(prompts_per_step=2)), data_task()
    problems, _ = prompts.step(learner, 3)
    assert steps == [(problems, 3)]
    assert problems == task.train_batch(3, 2)
    assert prompts.state_dict() == {}


@pytest.mark.parametrize(("prompts", "refused"), [(2**20, False), (2**20 + 1, True)])
def test_a_step_has_as_many_completions_as_are_said_to_be_the_most(prompts, refused):
    config = config_of(prompts_per_step=prompts)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, num_generations=16))
    if refused:
        with pytest.raises(InputError, match="is 16,777,232 completions per step, more than 16,777,216"):
            check(config)
    else:
        check(config)


@pytest.mark.parametrize("num_iterations", [1, 3])
def test_updates_on_a_batch_share_the_way_of_its_step(tiny_policy, num_iterations):
    """The schedule knows how many there are, and warms up by steps."""
    settings = {"num_iterations": num_iterations, "warmup_steps": 4}
    schedule = learner_of(tiny_policy, "oblrpo_shrunk", lr=1e-3, **settings).schedule
    assert (schedule.settings.updates, schedule.warmup) == (num_iterations, 4 * num_iterations)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dynamic_sampling": 3, "num_generations": 1}, "set num_generations to at least 2"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    config = TrainConfig()
    alone = dataclasses.replace(config.algorithm, algorithm="reinforce")
    with pytest.raises(InputError, match=said):
        check(dataclasses.replace(config, algorithm=alone, rollout=dataclasses.replace(config.rollout, **settings)))
