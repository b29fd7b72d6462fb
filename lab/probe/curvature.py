"""Curvature of J on a real policy, from sampled completions. The log-probabilities need only be twice differentiable.

The objective is mean_j (F_j - b_j) pi(o_j) / pi_old(o_j) with a leave-one-out baseline b. At the policy that was
sampled from, the expectation of its gradient is grad J and that of its Hessian is grad^2 J, whatever b is, because
E[grad^2 log pi + s s'] = 0. A direction is a list of tensors, one a trained parameter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.probe.lanczos import Direction, Ritz, inner, lanczos
from oblrpo import estimators
from oblrpo.errors import InputError
from oblrpo.intervals import Mean, mean, student_t
from oblrpo.policy import Policy, Sequences
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.settings import RolloutConfig
from oblrpo.tasks import Problem

BLOCKS = 16
"""Most blocks of prompts from whose spread the error of a curvature is taken."""

FEWEST_PROMPTS = 4
"""Fewest prompts of a batch: two halves give the gradient's norm, and each needs more than one."""


@dataclass(frozen=True)
class Samples:
    """Completions of the P prompts that have at least two rewards each, G completions a prompt."""

    sequences: Sequences
    """S = P G rows; row p G + j is completion j of prompt p."""
    rewards_PG: Tensor
    """Rewards F; NaN where a completion has none and counts for nothing."""
    advantages_PG: Tensor
    """F - b with RLOO's baseline; 0 where there is no reward."""
    logps_PG: Tensor
    """Log-probabilities (nats) under the policy that was sampled from."""
    temperature: float
    """Sampling temperature."""
    prompts_per_block: int
    """Prompts that are scored at a time; 0: all."""
    drawn: int
    """Prompts that were drawn, those with fewer than two rewards included."""

    def of(self, prompts: slice) -> Samples:
        """The samples of some of the prompts."""
        G = self.advantages_PG.shape[1]
        return replace(
            self, sequences=self.sequences.at(slice(prompts.start * G, prompts.stop * G)),
            rewards_PG=self.rewards_PG[prompts], advantages_PG=self.advantages_PG[prompts],
            logps_PG=self.logps_PG[prompts],
        )  # fmt: skip

    @property
    def informative(self) -> int:
        """Number of prompts whose rewards vary; the others say nothing of J around here."""
        highest_P = self.rewards_PG.nan_to_num(nan=-torch.inf).amax(1)
        lowest_P = self.rewards_PG.nan_to_num(nan=torch.inf).amin(1)
        return int((highest_P > lowest_P).sum())

    def blocks(self) -> Iterator[slice]:
        """Slices of all prompts, as many at a time as are scored together."""
        P = len(self.advantages_PG)
        per_block = self.prompts_per_block or P
        return (slice(start, min(start + per_block, P)) for start in range(0, P, per_block))


@torch.no_grad()
def draw(policy: Policy, rewards: Rewards, problems: list[Problem], rollout: RolloutConfig) -> Samples:
    """Sample completions, reward them, and take their log-probabilities. Uses torch's global random state.

    Raises:
        InputError: a prompt does not fit, or too few prompts have two rewards.
    """
    G = rollout.num_generations
    prompts = [problem.prompt for problem in problems]
    rollouts = sample(policy, prompts, G, rollout.max_completion_length, rollout.temperature)
    earned = rewards(problems, rollouts.completions, rollouts.ids)
    rewards_PG, valid_PG = (torch.tensor(each, device=policy.device) for each in earned)
    part_P = valid_PG.sum(1) >= 2
    if part_P.sum() < FEWEST_PROMPTS:
        raise InputError(
            f"only {int(part_P.sum())} of {len(problems)} prompts have two completions with a reward, and a probe "
            f"needs {FEWEST_PROMPTS}; fix the rewards, or give more prompts or outputs."
        )
    rewards_PG, valid_PG = rewards_PG[part_P], valid_PG[part_P]
    rewards_PG = torch.where(valid_PG, rewards_PG, torch.nan)
    advantages_PG = rewards_PG - estimators.baseline("rloo", rewards_PG, valid_PG=valid_PG)
    per_block = rollout.prompts_per_micro_batch or int(rollout.tokens_per_micro_batch > 0)
    blank = Samples(
        rollouts.sequences.at(part_P.repeat_interleave(G)), rewards_PG, torch.where(valid_PG, advantages_PG, 0),
        torch.zeros_like(rewards_PG), rollout.temperature, per_block, len(problems),
    )  # fmt: skip
    logps_PG = torch.cat([_logps(policy, blank, block) for block in blank.blocks()])
    return replace(blank, logps_PG=logps_PG)


def gradients(policy: Policy, samples: Samples) -> tuple[Direction, Direction]:
    """Two independent estimates of grad J, from the even and the odd prompts, importance-weighted if pi has moved."""
    halves = ([torch.zeros_like(p) for p in policy.parameters], [torch.zeros_like(p) for p in policy.parameters])
    P = len(samples.advantages_PG)
    for p in range(P):
        value = _surrogate(policy, samples, slice(p, p + 1)).sum() / ((P + 1 - p % 2) // 2)
        _add(halves[p % 2], torch.autograd.grad(value, policy.parameters, allow_unused=True))
    return halves


def hessian_times(policy: Policy, samples: Samples, direction: Direction) -> Direction:
    """The product of grad^2 J with a direction, by a backward through the backward."""
    total = [torch.zeros_like(p) for p in policy.parameters]
    with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no second derivative
        for block in samples.blocks():
            value = _surrogate(policy, samples, block).sum() / len(samples.advantages_PG)
            grads = torch.autograd.grad(value, policy.parameters, create_graph=True, allow_unused=True)
            along = torch.stack([(g * v).sum() for g, v in zip(grads, direction, strict=True) if g is not None]).sum()
            _add(total, torch.autograd.grad(along, policy.parameters, allow_unused=True))
    return total


def curvature_along(policy: Policy, samples: Samples, direction: Direction) -> Mean:
    """Curvature of J along a direction v, v' grad^2 J v / v'v, with its error by blocks of prompts; 0 where v = 0."""
    P, norm2 = len(samples.advantages_PG), inner(direction, direction)
    if not norm2:
        return Mean(0.0, 0.0, min(BLOCKS, P))
    values, sizes = [], []
    for prompts in torch.arange(P).tensor_split(min(BLOCKS, P)):
        block = samples.of(slice(int(prompts[0]), int(prompts[-1]) + 1))
        values.append(inner(direction, hessian_times(policy, block, direction)) / norm2)
        sizes.append(len(prompts))
    return mean_of_blocks(values, sizes)


def mean_of_blocks(values: list[float], sizes: list[int]) -> Mean:
    """Mean +- t s / sqrt(n) of values that are means of m_i each: sum m_i v_i / sum m_i, t Student's.

    s is the standard deviation (n - 1) of n m_i (v_i - mean) / sum m_i.
    """
    n = len(values)
    shares = [n * size / sum(sizes) for size in sizes]
    of_all = math.fsum(share * value for share, value in zip(shares, values, strict=True)) / n
    if n == 1:
        return Mean(of_all, None, n)
    deviations = [share * (value - of_all) for share, value in zip(shares, values, strict=True)]
    return Mean(of_all, student_t(n - 1) * statistics.stdev(deviations) / math.sqrt(n), n)


def steepest_curvature(policy: Policy, samples: Samples, iterations: int, generator: torch.Generator) -> Ritz:
    """Both ends of the spectrum of grad^2 J on these samples, and the direction of the larger, by Lanczos.

    They are too large in size: the greatest eigenvalue is a convex function of the matrix, so that a noisy matrix has
    on average a greater one than its mean. On other samples the curvature along the direction that was found is on
    average no more than the true greatest one.
    """
    start = [torch.randn(p.shape, generator=generator).to(p) for p in policy.parameters]
    return lanczos(lambda direction: hessian_times(policy, samples, direction), start, iterations)


@torch.no_grad()
def improvement(policy: Policy, samples: Samples) -> Mean:
    """J of the policy as it is now less J of the policy that was sampled from, by importance weights."""
    values_PG = torch.cat([_surrogate(policy, samples, block) for block in samples.blocks()])
    return mean(values_PG.double().sum(1).tolist())  # where the weights are 1, RLOO's advantages add up to 0


def _logps(policy: Policy, samples: Samples, prompts: slice) -> Tensor:
    G = samples.advantages_PG.shape[1]
    batch = samples.sequences.at(slice(prompts.start * G, prompts.stop * G))
    return policy.logps(batch, samples.temperature).logps_S.view(-1, G)


def _surrogate(policy: Policy, samples: Samples, prompts: slice) -> Tensor:
    """The terms (F - b) pi / pi_old / G of some prompts, G the completions with a reward; add them over completions."""
    logps_PG = _logps(policy, samples, prompts)
    ratio_PG = (logps_PG - samples.logps_PG[prompts]).exp()
    G_P1 = (~samples.rewards_PG[prompts].isnan()).sum(1, keepdim=True)
    return ratio_PG * samples.advantages_PG[prompts] / G_P1


def _add(total: Direction, part: tuple[Tensor | None, ...]) -> None:
    for mine, other in zip(total, part, strict=True):
        if other is not None:
            mine += other.detach()
