"""Curvature of J on a real policy, from sampled completions: nothing is assumed of log pi but that it can be derived.

At the policy that was sampled from, mean_j (F_j - b_j) pi(o_j) / pi_old(o_j) has grad J for its gradient and grad^2 J
for its Hessian on average, whatever a leave-one-out b is: E[grad^2 log pi + s s'] = 0. A direction is a list of
tensors, one a trained parameter. P prompts, G completions each, S = P G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oblrpo import estimators
from oblrpo.config import RolloutConfig
from oblrpo.policy import Policy, Sequences
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.tasks import Problem

Direction = list[Tensor]

BLOCKS = 16
"""Of prompts, by which the standard error of a curvature is taken."""


class Measured(NamedTuple):
    """A mean over prompts and its standard error."""

    value: float
    stderr: float


@dataclass(frozen=True)
class Samples:
    """Completions of prompts, with the advantages of RLOO and the log-probabilities they were drawn with."""

    sequences: Sequences
    rewards_PG: Tensor
    advantages_PG: Tensor
    logps_PG: Tensor
    temperature: float
    prompts_per_block: int

    def of(self, prompts: slice) -> Samples:
        """Those of some prompts."""
        G = self.advantages_PG.shape[1]
        return replace(
            self, sequences=self.sequences.rows(prompts.start * G, prompts.stop * G),
            rewards_PG=self.rewards_PG[prompts], advantages_PG=self.advantages_PG[prompts],
            logps_PG=self.logps_PG[prompts],
        )  # fmt: skip

    def blocks(self) -> Iterator[slice]:
        """Prompts, some at a time."""
        P = len(self.advantages_PG)
        per_block = self.prompts_per_block or P
        return (slice(start, min(start + per_block, P)) for start in range(0, P, per_block))


@torch.no_grad()
def draw(policy: Policy, rewards: Rewards, problems: list[Problem], rollout: RolloutConfig) -> Samples:
    """Sample, pay and score; uses torch's global random state.

    Raises:
        InputError: a prompt does not fit.
    """
    G = rollout.num_generations
    prompts = [problem.prompt for problem in problems]
    rollouts = sample(policy, prompts, G, rollout.max_completion_length, rollout.temperature)
    rewards_PG = torch.tensor(rewards(problems, rollouts.completions), device=policy.device)
    advantages_PG = rewards_PG - estimators.baseline("rloo", rewards_PG)
    blank = Samples(
        rollouts.sequences, rewards_PG, advantages_PG, torch.zeros_like(rewards_PG), rollout.temperature,
        rollout.prompts_per_micro_batch,
    )  # fmt: skip
    logps_PG = torch.cat([_logps(policy, blank, block) for block in blank.blocks()])
    return replace(blank, logps_PG=logps_PG)


def gradients(policy: Policy, samples: Samples) -> tuple[Direction, Direction]:
    """Grad J by the even prompts and by the odd ones, importance-weighted if the policy has moved since."""
    halves = ([torch.zeros_like(p) for p in policy.parameters], [torch.zeros_like(p) for p in policy.parameters])
    P = len(samples.advantages_PG)
    for p in range(P):
        value = _surrogate(policy, samples, slice(p, p + 1)).sum() / ((P + 1 - p % 2) // 2)
        _add(halves[p % 2], torch.autograd.grad(value, policy.parameters, allow_unused=True))
    return halves


def hessian_times(policy: Policy, samples: Samples, direction: Direction) -> Direction:
    """Grad^2 J v, by a backward through the backward."""
    total = [torch.zeros_like(p) for p in policy.parameters]
    with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no second derivative
        for block in samples.blocks():
            value = _surrogate(policy, samples, block).sum() / len(samples.advantages_PG)
            grads = torch.autograd.grad(value, policy.parameters, create_graph=True, allow_unused=True)
            along = torch.stack([(g * v).sum() for g, v in zip(grads, direction, strict=True) if g is not None]).sum()
            _add(total, torch.autograd.grad(along, policy.parameters, allow_unused=True))
    return total


def curvature_along(policy: Policy, samples: Samples, direction: Direction) -> Measured:
    """V' grad^2 J v / v'v; 0 of no direction."""
    P, norm2 = len(samples.advantages_PG), inner(direction, direction)
    if not norm2:
        return Measured(0.0, 0.0)
    size = -(-P // BLOCKS)
    values = []
    for start in range(0, P, size):
        block = samples.of(slice(start, min(start + size, P)))
        values += [inner(direction, hessian_times(policy, block, direction)) / norm2] * len(block.advantages_PG)
    return _measured(torch.tensor(values, dtype=torch.float64), len(values) / size)


def steepest_curvature(
    policy: Policy, samples: Samples, iterations: int, generator: torch.Generator
) -> tuple[Direction, float]:
    """The direction of largest |curvature| of these samples, by power iteration, and that curvature.

    In sample it is too large: noise adds directions of its own. Measure the direction again on other samples.
    """
    direction = [torch.randn(p.shape, generator=generator).to(p) for p in policy.parameters]
    largest = 0.0
    for _ in range(iterations):
        norm = inner(direction, direction) ** 0.5
        direction = [v / norm for v in direction]
        product = hessian_times(policy, samples, direction)
        largest = inner(direction, product)
        if not inner(product, product):  # all advantages are 0
            break
        direction = product
    return direction, largest


@torch.no_grad()
def improvement(policy: Policy, samples: Samples) -> Measured:
    """J now less J of the policy that was sampled from, by importance weights."""
    now_PG = torch.cat([_surrogate(policy, samples, block) for block in samples.blocks()])
    return _measured((now_PG.sum(1) - samples.advantages_PG.mean(1)).double())


def inner(a: Direction, b: Direction) -> float:
    """<a, b> in float64."""
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def _measured(values_P: Tensor, independent: float | None = None) -> Measured:
    return Measured(float(values_P.mean()), float(values_P.std() / (independent or len(values_P)) ** 0.5))


def _logps(policy: Policy, samples: Samples, prompts: slice) -> Tensor:
    G = samples.advantages_PG.shape[1]
    batch = samples.sequences.rows(prompts.start * G, prompts.stop * G)
    return policy.logps(batch, samples.temperature).logps_S.view(-1, G)


def _surrogate(policy: Policy, samples: Samples, prompts: slice) -> Tensor:
    """(F - b) pi / pi_old of some prompts, divided by G: its sum over outputs and mean over prompts is J but for b."""
    logps_PG = _logps(policy, samples, prompts)
    ratio_PG = (logps_PG - samples.logps_PG[prompts]).exp()
    return ratio_PG * samples.advantages_PG[prompts] / samples.advantages_PG.shape[1]


def _add(total: Direction, part: tuple[Tensor | None, ...]) -> None:
    for mine, other in zip(total, part, strict=True):
        if other is not None:
            mine += other.detach()
