"""Gradient, Hessian and improvement of the surrogate against autograd on a policy small enough for a whole Hessian."""

import dataclasses
import math
import statistics

import pytest
import torch

from lab.probe import curvature
from lab.probe.lanczos import inner
from oblrpo.errors import InputError
from oblrpo.intervals import Mean, student_t
from oblrpo.rewards import Rewards
from oblrpo.settings import RolloutConfig
from tests.lab.probe.conftest import G, P, Varied, drawn, whole_hessian


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
    assert along.margin > 0
    found = curvature.steepest_curvature(policy, samples, 20, generator)
    eigenvalues = torch.linalg.eigvalsh((hessian + hessian.T) / 2)
    assert found.highest == pytest.approx(float(eigenvalues[-1]), rel=1e-4)
    assert found.lowest == pytest.approx(float(eigenvalues[0]), rel=1e-4)
    assert abs(found.value) == pytest.approx(float(eigenvalues.abs().max()), rel=1e-4)


@pytest.mark.usefixtures("stay_double")
def test_improvement_is_first_order_right_and_zero_at_home(policy, samples):
    assert curvature.improvement(policy, samples).value == pytest.approx(0.0, abs=1e-12)
    even, odd = curvature.gradients(policy, samples)
    step = [1e-4 * (a + b) / 2 for a, b in zip(even, odd, strict=True)]
    with torch.no_grad():
        for p, move in zip(policy.parameters, step, strict=True):
            p += move
    realised = curvature.improvement(policy, samples)
    predicted = (inner(even, step) + inner(odd, step)) / 2
    assert realised.value == pytest.approx(predicted, rel=1e-2)
    assert realised.margin > 0


def test_standard_errors_are_those_of_the_mean(policy):
    """Of improvement and of curvature: the spread over 40 independent batches against what each says of itself."""
    task, rollout, found = Varied(), RolloutConfig(num_generations=G, max_completion_length=5), []
    torch.manual_seed(2)
    direction = [torch.randn(p.shape).to(p) for p in policy.parameters]
    for step in range(40):
        drawn = curvature.draw(policy, Rewards(task), task.train_batch(step, 10), rollout)
        bend = curvature.curvature_along(policy, drawn, direction)
        with torch.no_grad():
            for sign in (1, -1):
                for p, v in zip(policy.parameters, direction, strict=True):
                    p += sign * 0.02 * v
                if sign == 1:
                    found.append((curvature.improvement(policy, drawn), bend))
    for means in zip(*found, strict=True):
        said = [mean.margin / student_t(mean.n - 1) for mean in means]
        spread = statistics.stdev(mean.value for mean in means)
        assert spread == pytest.approx(statistics.fmean(error**2 for error in said) ** 0.5, rel=0.35)


def test_the_error_of_blocks_of_unequal_size(policy):
    """18 prompts in 16 blocks, two of two prompts: by hand from the blocks' own curvatures."""
    samples = drawn(policy, 3, 18)
    direction = [torch.ones_like(p) for p in policy.parameters]
    norm2, found = inner(direction, direction), curvature.curvature_along(policy, samples, direction)
    sizes = [2, 2, *[1] * 14]
    starts = [sum(sizes[:k]) for k in range(16)]
    each = [
        inner(direction, curvature.hessian_times(policy, samples.of(slice(a, a + n)), direction)) / norm2
        for a, n in zip(starts, sizes, strict=True)
    ]
    mean = sum(n * value for n, value in zip(sizes, each, strict=True)) / 18
    assert found.value == pytest.approx(mean)
    assert found.value == pytest.approx(
        inner(direction, curvature.hessian_times(policy, samples, direction)) / norm2, rel=1e-5
    )
    spread = sum((n * (value - mean)) ** 2 for n, value in zip(sizes, each, strict=True))
    assert found.margin == pytest.approx(student_t(15) * (16 / 15 * spread) ** 0.5 / 18)
    assert found.n == 16


def test_no_direction_no_curvature(policy, samples):
    nowhere = [torch.zeros_like(p) for p in policy.parameters]
    assert curvature.curvature_along(policy, samples, nowhere) == Mean(0.0, 0.0, P)


def test_no_advantage_anywhere(policy, samples):
    flat = dataclasses.replace(samples, advantages_PG=torch.zeros(P, G, dtype=torch.float64))
    found = curvature.steepest_curvature(policy, flat, 5, torch.Generator().manual_seed(0))
    assert (found.lowest, found.highest, found.residual) == (0, 0, 0)


def test_prompts_that_say_something(samples):
    rewards_PG = torch.tensor([[1.0, 1, 1], [0, 1, 0], [0.1, 0.1, 0.1], [0, 0, 2]])
    assert dataclasses.replace(samples, rewards_PG=rewards_PG).informative == 2


class Holed(Varied):
    """Some completions have no reward; in every third prompt none but the first has one."""

    def rewards(self, problems, completions):
        values = super().rewards(problems, completions)
        holes = [(s // G % 3 == 2 and s % G) or s % 7 == 3 for s in range(len(values))]
        return [math.nan if hole else value for hole, value in zip(holes, values, strict=True)]


def test_completions_without_a_reward_count_for_nothing(policy):
    """Against the mean over each prompt's completions that have one, with the mean of the others for a baseline."""
    task = Holed()
    torch.manual_seed(1)
    rewards = Rewards(task, on_error="mask")
    problems = task.train_batch(1, 12)
    samples = curvature.draw(policy, rewards, problems, RolloutConfig(num_generations=G, max_completion_length=5))
    assert (len(samples.rewards_PG), samples.drawn) == (8, 12)
    assert samples.rewards_PG.isnan().any()
    logps_PG = policy.logps(samples.sequences).logps_S.view(-1, G)
    terms = []
    for row, logps in zip(samples.rewards_PG.tolist(), logps_PG, strict=True):
        known = [j for j in range(G) if not math.isnan(row[j])]
        others = {j: statistics.fmean(row[i] for i in known if i != j) for j in known}
        terms.append(sum((row[j] - others[j]) * logps[j] for j in known) / len(known))
    for half, kept in zip(curvature.gradients(policy, samples), (terms[::2], terms[1::2]), strict=True):
        expected = torch.autograd.grad(sum(kept) / len(kept), policy.parameters, retain_graph=True)
        torch.testing.assert_close(half, list(expected))


def test_too_few_rewards_are_refused(policy):
    rewards, rollout = Rewards(Holed(), on_error="mask"), RolloutConfig(num_generations=G, max_completion_length=5)
    with pytest.raises(InputError, match="only 3 of 4 prompts have two completions with a reward"):
        curvature.draw(policy, rewards, rewards.task.train_batch(1, 4), rollout)
