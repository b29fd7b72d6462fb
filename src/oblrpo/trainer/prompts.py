"""Which prompts a step learns from: those of the task's own order, or others until groups differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from oblrpo.settings import TrainConfig
from oblrpo.step import Samples
from oblrpo.tasks import Problem, Task
from oblrpo.trainer.learner import Learner, StepResult


class Prompts:
    """Takes the prompts of every step from the task, which decides by the number of the step.

    With `dynamic_sampling` (DAPO's) prompts whose outputs have earned the same are dropped, and others sampled for
    them. Batches are taken from the task one after the other until prompts_per_step prompts have outputs that differ,
    or so many rounds are over; what is missing then is filled up with prompts that were dropped, which give no
    gradient. The prompts that are trained on depend on what their outputs earned: the objective is another one.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.size, self.most = task, config.rollout.prompts_per_step, config.rollout.dynamic_sampling
        self.batches = 0
        """How many batches of the task dynamic sampling has used so far."""

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], StepResult]:
        """Let the learner make a step; return it with the problems that it learned from."""
        if not self.most:
            problems = self.task.train_batch(number, self.size)
            return problems, learner.step(problems, number)
        problems, rounds = list[Problem](), list[Samples]()
        differ = torch.zeros(0, dtype=torch.bool)
        while len(rounds) < self.most and int(differ.sum()) < self.size:
            self.batches += 1
            more = self.task.train_batch(self.batches, self.size)
            rounds.append(learner.sample(more))
            problems += more
            differ = torch.cat([_differ(sampled).cpu() for sampled in rounds])
        chosen_P = torch.argsort(differ, descending=True, stable=True)[: self.size]
        sampled = Samples.join(rounds)
        done = learner.learn_from(sampled.at(chosen_P), number)
        return [problems[index] for index in chosen_P.tolist()], replace(done, all_samples=sampled, rounds=len(rounds))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draw depends on, beside the number of the step."""
        return {"batches": self.batches} if self.most else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.batches = int(state["batches"]) if self.most else 0


def _differ(sampled: Samples) -> torch.Tensor:
    """Which prompts have outputs that have earned different rewards, (P,)."""
    rewards_PG, valid_PG = sampled.rewards_PG, sampled.valid_PG
    return rewards_PG.where(valid_PG, -torch.inf).amax(1) > rewards_PG.where(valid_PG, torch.inf).amin(1)
