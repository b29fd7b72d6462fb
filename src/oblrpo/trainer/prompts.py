"""Which prompts a step learns from: those of the task's own order, or others until groups differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from oblrpo.settings import TrainConfig
from oblrpo.step import Sampled
from oblrpo.tasks import Problem, Task
from oblrpo.trainer.learner import Learner, StepResult


class Prompts:
    """Takes the prompts of every step from the task, which decides by the number of the step.

    Args:
        task: the problems.
        config: the number of prompts a step, and how they are drawn.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.size = task, config.rollout.prompts_per_step

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], StepResult]:
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
        """Take up where `state_dict` left off."""


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

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], StepResult]:
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
        return [problems[index] for index in chosen_P.tolist()], replace(done, sampled=every, rounds=len(rounds))

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
    """What draws the prompts of a run."""
    return (DynamicSampling if config.rollout.dynamic_sampling else Prompts)(task, config)
