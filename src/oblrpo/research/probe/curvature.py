"""Curvature of J on a real policy, from sampled completions: nothing is assumed of log pi but that it can be derived.

At the policy that was sampled from, mean_j (F_j - b_j) pi(o_j) / pi_old(o_j) has grad J for its gradient and grad^2 J
for its Hessian on average, whatever a leave-one-out b is: E[grad^2 log pi + s s'] = 0. A direction is a list of
tensors, one a trained parameter. P prompts, G completions each, S = P G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oblrpo import estimators
from oblrpo.config import RolloutConfig
from oblrpo.policy import Policy, Sequences
from oblrpo.research.probe.intervals import Measured, measured
from oblrpo.research.probe.lanczos import Direction, Ritz, inner, lanczos
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.tasks import Problem

BLOCKS = 16
"""Of prompts, at most, by which the standard error of a curvature is taken."""


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

    @property
    def informative(self) -> int:
        """Prompts whose rewards vary: the others say nothing of J around here."""
        return int((self.rewards_PG != self.rewards_PG[:, :1]).any(1).sum())

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
    """V' grad^2 J v / v'v, with its error by blocks of prompts; 0 of no direction."""
    P, norm2 = len(samples.advantages_PG), inner(direction, direction)
    if not norm2:
        return Measured(0.0, 0.0, min(BLOCKS, P) - 1)
    values, sizes = [], []
    for prompts in torch.arange(P).tensor_split(min(BLOCKS, P)):
        block = samples.of(slice(int(prompts[0]), int(prompts[-1]) + 1))
        values.append(inner(direction, hessian_times(policy, block, direction)) / norm2)
        sizes.append(len(prompts))
    return measured(torch.tensor(values, dtype=torch.float64), torch.tensor(sizes))


def steepest_curvature(policy: Policy, samples: Samples, iterations: int, generator: torch.Generator) -> Ritz:
    """The ends of the spectrum of these samples' grad^2 J, and the direction of the larger, by Lanczos.

    In sample it is too large: the greatest eigenvalue is convex, so that of a noisy matrix is on average no less than
    that of its mean. Measure the direction again on other samples, which gives no more than the greatest.
    """
    start = [torch.randn(p.shape, generator=generator).to(p) for p in policy.parameters]
    return lanczos(lambda direction: hessian_times(policy, samples, direction), start, iterations)


@torch.no_grad()
def improvement(policy: Policy, samples: Samples) -> Measured:
    """J now less J of the policy that was sampled from, by importance weights; RLOO's advantages add up to 0 there."""
    return measured(torch.cat([_surrogate(policy, samples, block) for block in samples.blocks()]).sum(1))


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
