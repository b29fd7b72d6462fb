"""Held-out accuracy with a standard error that treats the completions of one problem as dependent."""

import math
from dataclasses import dataclass

import torch

from oblrpo.policy import Policy
from oblrpo.rewards import Rewards
from oblrpo.rollout import Sampler
from oblrpo.settings import RolloutConfig
from oblrpo.tasks import Problem


@dataclass(frozen=True)
class Accuracy:
    """The mean reward over problems and their k completions (avg@k), with its uncertainty."""

    value: float
    """The mean."""
    stderr: float
    """The standard error over problems, since the k completions of one problem are not independent."""


def heldout_accuracy(
    policy: Policy,
    rewards: Rewards,
    problems: list[Problem],
    samples: int,
    rollout: RolloutConfig,
    seed: int,
    sampler: Sampler,
) -> Accuracy:
    """Return avg@k of the policy, sampled as in training; torch's random state is put back afterwards."""
    blocks = []
    with policy.seeded(seed):
        at_once = max(1, rollout.prompts_per_step * rollout.num_generations // samples)
        for start in range(0, len(problems), at_once):
            part = problems[start : start + at_once]
            prompts = [problem.prompt for problem in part]
            drawn = sampler.sample(prompts, samples, rollout.max_completion_length, rollout.temperature)
            earned = rewards(part, drawn.completions, drawn.ids)
            rewards_PG, valid_PG = (torch.tensor(rows, device="cpu") for rows in earned)
            blocks.append(torch.where(valid_PG, rewards_PG, torch.nan))
    mean_P = torch.cat(blocks).double().nanmean(1)
    mean_P = mean_P[mean_P.isfinite()]  # of problems with a reward
    stderr = mean_P.std().item() / len(mean_P) ** 0.5 if len(mean_P) > 1 else math.nan
    return Accuracy(mean_P.mean().item(), stderr)  # NaN: every completion was masked
