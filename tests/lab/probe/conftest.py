"""A float64 policy small enough for a whole Hessian, and rewards that vary from the start."""

import pytest
import torch

from lab.probe import curvature
from oblrpo.policy import make_policy
from oblrpo.rewards import Rewards
from oblrpo.settings import PolicyConfig, RolloutConfig
from oblrpo.tasks import make_task
from tests.scores.stay_double import StayDouble

P, G = 6, 3


class Varied:
    """Rewards that differ, as the length of a completion does."""

    name, about, default_rewards = "varied", "", ("task",)

    def __init__(self):
        self.task = make_task("path", 0)

    def train_batch(self, step, size):
        return self.task.train_batch(step, size)

    def heldout(self, size):
        return self.task.heldout(size)

    def rewards(self, problems, completions):
        return [len(text) % 4 / 3 for text in completions]


@pytest.fixture
def stay_double():
    with StayDouble():
        yield


@pytest.fixture
def policy():
    torch.manual_seed(0)
    made = make_policy(
        PolicyConfig(model_args={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
    )
    made.model.double()
    for name, p in made.model.named_parameters():
        p.requires_grad_("layernorm" in name)  # few enough for a Hessian
    return made


def drawn(policy, step, prompts=P):
    """Completions of the prompts of one step."""
    torch.manual_seed(step)
    task = Varied()
    rollout = RolloutConfig(num_generations=G, max_completion_length=5)
    return curvature.draw(policy, Rewards(task), task.train_batch(step, prompts), rollout)


@pytest.fixture
def samples(policy):
    return drawn(policy, 1)


def whole_hessian(policy, samples):
    """By columns, from differences of gradients over all prompts."""

    def gradient():
        even, odd = curvature.gradients(policy, samples)
        return torch.cat([((a + b) / 2).flatten() for a, b in zip(even, odd, strict=True)])

    start = torch.nn.utils.parameters_to_vector(policy.parameters).detach()
    columns, h = [], 1e-5
    for index in range(len(start)):
        sides = []
        for sign in (1, -1):
            moved = start.clone()
            moved[index] += sign * h
            torch.nn.utils.vector_to_parameters(moved, policy.parameters)
            sides.append(gradient())
        columns.append((sides[0] - sides[1]) / (2 * h))
    torch.nn.utils.vector_to_parameters(start, policy.parameters)
    return torch.stack(columns)
