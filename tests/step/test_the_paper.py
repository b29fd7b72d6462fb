"""Algorithm 1 by itself, as the paper has it, is the first update of a run with nothing added."""

import copy

import pytest
import torch

from oblrpo.tasks import Problem
from tests.trainer.learners import learner_of

P, G, STEPS = 4, 3, 3
PROBLEMS = [Problem(text, text) for text in ("a", "bcd", "ef", "ghij")]


def rewards(problems, completions, ids):
    return [[sum(completions[p * G + j].encode()) % 5 / 4 for j in range(G)] for p in range(P)], [[True] * G] * P


@pytest.mark.parametrize("algorithm", ["oblrpo", "oblrpo_shrunk", "rloo", "grpo", "opo"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_a_run_with_nothing_added_takes_the_papers_steps(tiny_policy, algorithm, micro_batch):
    """Bit by bit, and every step moves the policy."""
    settings = {"num_generations": G, "max_completion_length": 6, "prompts_per_micro_batch": micro_batch}
    weights = []
    for alone in (True, False):
        policy = copy.deepcopy(tiny_policy)
        learner = learner_of(policy, algorithm, rewards=rewards, train_on="all", max_grad_norm=0.0, **settings)
        steps = learner.core if alone else learner
        torch.manual_seed(2)  # of whose batches each has a signal: else the schedule `debiased` rightly makes no step
        weights.append([])
        for step in range(1, STEPS + 1):
            steps.step(PROBLEMS, step)
            weights[-1].append(torch.cat([p.detach().flatten() for p in policy.parameters]))
    assert all(map(torch.equal, *weights))
    assert not any(map(torch.equal, weights[0], weights[0][1:]))
