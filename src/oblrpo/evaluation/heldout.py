"""Held-out accuracy of a policy that is in training."""

from collections.abc import Iterator
from typing import Any

import torch

from oblrpo.evaluation.evaluate import Ids, evaluate
from oblrpo.evaluation.statistics import Estimate
from oblrpo.policy import Policy
from oblrpo.rewards import Rewards
from oblrpo.rollout import Sampler
from oblrpo.settings import RolloutConfig
from oblrpo.tasks import Problem


def heldout_accuracy(
    policy: Policy,
    rewards: Rewards,
    problems: list[Problem],
    samples: int,
    rollout: RolloutConfig,
    seed: int,
    sampler: Sampler,
) -> Estimate:
    """Return avg@k of the policy, sampled as in training; torch's random state is put back afterwards."""

    def drawn() -> Iterator[tuple[list[Problem], list[str], Ids]]:
        at_once = max(1, rollout.prompts_per_step * rollout.num_generations // samples)
        for start in range(0, len(problems), at_once):
            part = problems[start : start + at_once]
            prompts = [problem.prompt for problem in part]
            draws = sampler.sample(prompts, samples, rollout.max_completion_length, rollout.temperature)
            yield part, draws.completions, draws.ids

    def grade(*batch: Any) -> tuple[list[list[float]], list[list[bool]]]:
        values_PG, valid_PG = rewards(*batch)
        return torch.tensor(values_PG, device="cpu").tolist(), valid_PG  # in the precision that a step has them in

    with policy.seeded(seed):
        return evaluate(drawn(), samples, grade).average()
