"""Which prompts a step learns from: the task's own order, by the pull of their gradients, or until groups differ."""

from __future__ import annotations

from typing import Any

import torch

from oblrpo import estimators
from oblrpo.config import TrainConfig
from oblrpo.errors import InputError
from oblrpo.seeds import seed_of
from oblrpo.tasks import DataTask, Problem, Task
from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.results import Sampled, Step


class Prompts:
    """Takes the prompts of every step from the task, which decides by the number of the step.

    Args:
        task: the problems.
        config: the seed, the number of prompts a step, and how they are drawn.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.seed, self.size = task, config.run.seed, config.rollout.prompts_per_step

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], Step]:
        """Let the learner make a step; return it with the problems that it learned from.

        Raises:
            InputError: as the learner raises.
        """
        problems = self.task.train_batch(number, self.size)
        return problems, learner.step(problems, number)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draw depends on, beside the number of the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            InputError: it does not fit the data.
        """


class PromptsByPull(Prompts):
    """Draws prompts with chances that follow their gradients' norms so far, and weighs each by what that changes.

    Raises:
        InputError: the task generates its problems, so that none is met again.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        super().__init__(task, config)
        if not isinstance(task, DataTask):
            raise InputError(f"prompt_sampling pull needs data; the task {task.name!r} generates its problems.")
        self.problems = task.training
        self.pulls = estimators.PromptPulls(len(self.problems))

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], Step]:
        """Draw by the seed and the step's number, learn, and keep the norms of the prompts' gradients."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, number))
        index_P, weight_P = self.pulls.draw(self.size, generator)
        problems = [self.problems[index] for index in index_P.tolist()]
        done = learner.step(problems, number, weight_P)
        if done.updates:
            gradient = done.updates[0].gradient
            part_P = gradient.batch.part_P.cpu()
            index_P, weight_P = index_P[part_P], weight_P[part_P]
            self.pulls.observe(index_P, weight_P, gradient.group_norm2_P.cpu() / weight_P.square())
        return problems, done

    def state_dict(self) -> dict[str, Any]:
        """What earlier steps say of every prompt."""
        return self.pulls.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            InputError: the data have changed.
        """
        try:
            self.pulls.load_state_dict(state)
        except (KeyError, ValueError) as error:
            raise InputError(
                f"what the run knows of its prompts does not fit ({error}); resume it with its data."
            ) from None


class DynamicSampling(Prompts):
    """DAPO's dynamic sampling: prompts whose outputs have earned the same are dropped, and others sampled for them.

    Batches are taken from the task one after the other until prompts_per_step prompts have outputs that differ, or
    so many rounds are over; what is missing then is filled up with prompts that were dropped, which give no gradient.
    The prompts that are trained on depend on what their outputs earned: the objective is another one.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        super().__init__(task, config)
        self.most = config.rollout.dynamic_sampling
        self.batches = 0
        """How many batches of the task have been sampled so far."""

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], Step]:
        """Sample rounds of prompts until enough of them differ, and learn from those."""
        problems: list[Problem] = []
        rounds: list[Sampled] = []
        differ = torch.zeros(0, dtype=torch.bool)
        while len(rounds) < self.most and int(differ.sum()) < self.size:
            self.batches += 1
            asked = self.task.train_batch(self.batches, self.size)
            rounds.append(learner.sample(asked))
            problems += asked
            differ = torch.cat([_differ(each).cpu() for each in rounds])
        chosen_P = torch.argsort(differ, descending=True, stable=True)[: self.size]
        every = Sampled.join(rounds)
        done = learner.learn_from(every.at(chosen_P), number)
        return [problems[index] for index in chosen_P.tolist()], done.of_rounds(every, len(rounds))

    def state_dict(self) -> dict[str, Any]:
        """How far the task's batches have been used."""
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.batches = int(state["batches"])


def _differ(sampled: Sampled) -> torch.Tensor:
    """Which prompts have outputs that have earned different rewards, (P,)."""
    rewards_PG, valid_PG = sampled.rewards_PG, sampled.valid_PG
    least_P = rewards_PG.where(valid_PG, torch.inf).amin(1)
    most_P = rewards_PG.where(valid_PG, -torch.inf).amax(1)
    return most_P > least_P


def prompts_of(task: Task, config: TrainConfig) -> Prompts:
    """What draws the prompts of a run.

    Raises:
        InputError: the task does not have what that needs.
    """
    if config.rollout.dynamic_sampling:
        return DynamicSampling(task, config)
    return (PromptsByPull if config.rollout.prompt_sampling == "pull" else Prompts)(task, config)
