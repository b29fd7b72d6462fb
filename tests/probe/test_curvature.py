"""Gradient, Hessian and improvement of the surrogate against autograd on a policy small enough for a whole Hessian."""

import dataclasses

import pytest
import torch

from oblrpo.config import PolicyConfig, RolloutConfig
from oblrpo.policy import make_policy
from oblrpo.probe import curvature
from oblrpo.rewards import Rewards
from oblrpo.tasks import make_task
from tests.scores.stay_double import StayDouble

P, G = 4, 3


class Varied:
    """Rewards that differ, as the length of a completion does."""

    name, default_rewards = "varied", ("task",)

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
    made = make_policy(PolicyConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, device="cpu"))
    made.model.double()
    for name, p in made.model.named_parameters():
        p.requires_grad_("down_proj" in name)  # few enough for a Hessian
    return made


@pytest.fixture
def samples(policy):
    torch.manual_seed(1)
    task = Varied()
    rollout = RolloutConfig(num_generations=G, max_completion_length=5)
    return curvature.draw(policy, Rewards(task), task.train_batch(1, P), rollout)


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


def test_gradients_of_the_two_halves(policy, samples):
    """(1/G) sum_j A_j grad log pi_j of each half's prompts, on-policy."""
    halves = curvature.gradients(policy, samples)
    for first, half in enumerate(halves):
        kept = list(range(first, P, 2))
        logps_PG = policy.logps(samples.sequences).logps_S.view(P, G)
        expected = torch.autograd.grad(
            (logps_PG * samples.advantages_PG)[kept].sum() / G / len(kept), policy.parameters
        )
        torch.testing.assert_close(half, list(expected))


@pytest.mark.usefixtures("stay_double")
@pytest.mark.parametrize("per_block", [0, 2])
def test_the_hessian_and_its_largest_eigenvalue(policy, samples, per_block):
    samples = dataclasses.replace(samples, prompts_per_block=per_block)
    hessian = whole_hessian(policy, samples)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in policy.parameters]
    flat = torch.cat([v.flatten() for v in direction])
    found = torch.cat([v.flatten() for v in curvature.hessian_times(policy, samples, direction)])
    torch.testing.assert_close(found, hessian @ flat, rtol=1e-5, atol=1e-7)
    along = curvature.curvature_along(policy, samples, direction)
    assert along.value == pytest.approx(float(flat @ hessian @ flat / (flat @ flat)), rel=1e-5)
    assert along.stderr > 0
    _, largest = curvature.steepest_curvature(policy, samples, 60, generator)
    eigenvalues = torch.linalg.eigvalsh((hessian + hessian.T) / 2)
    assert abs(largest) == pytest.approx(float(eigenvalues.abs().max()), rel=1e-2)


@pytest.mark.usefixtures("stay_double")
def test_improvement_is_first_order_right_and_zero_at_home(policy, samples):
    assert curvature.improvement(policy, samples).value == pytest.approx(0.0, abs=1e-12)
    even, odd = curvature.gradients(policy, samples)
    step = [1e-4 * (a + b) / 2 for a, b in zip(even, odd, strict=True)]
    with torch.no_grad():
        for p, move in zip(policy.parameters, step, strict=True):
            p += move
    realised = curvature.improvement(policy, samples)
    predicted = (curvature.inner(even, step) + curvature.inner(odd, step)) / 2
    assert realised.value == pytest.approx(predicted, rel=1e-2)
    assert realised.stderr > 0


def test_standard_errors_are_those_of_the_mean(policy):
    """Of improvement and of curvature: the spread over 60 independent batches against what each says of itself."""
    task, rollout, found = Varied(), RolloutConfig(num_generations=G, max_completion_length=5), []
    torch.manual_seed(2)
    direction = [torch.randn(p.shape).to(p) for p in policy.parameters]
    for step in range(60):
        drawn = curvature.draw(policy, Rewards(task), task.train_batch(step, 16), rollout)
        bend = curvature.curvature_along(policy, drawn, direction)
        with torch.no_grad():
            for sign in (1, -1):
                for p, v in zip(policy.parameters, direction, strict=True):
                    p += sign * 0.02 * v
                if sign == 1:
                    found.append((*curvature.improvement(policy, drawn), *bend))
    values = torch.tensor(found, dtype=torch.float64)
    for column in (0, 2):
        said = values[:, column + 1].square().mean().sqrt()
        assert float(values[:, column].std()) == pytest.approx(float(said), rel=0.35)


def test_no_advantage_anywhere(policy, samples):
    flat = dataclasses.replace(samples, advantages_PG=torch.zeros(P, G, dtype=torch.float64))
    _, largest = curvature.steepest_curvature(policy, flat, 5, torch.Generator().manual_seed(0))
    assert largest == 0
