"""Exact mean and covariance of gradient estimators: every group of G outputs that could have been sampled, weighed.

Q prompts, O outputs, D parameters, G outputs a group, B = O^G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.theory.worlds import World

BaselineFunction = Callable[[Tensor, Tensor], Tensor]
"""(rewards_BG, norm2_BG) -> baseline_BG, of B groups that know nothing of each other."""


@dataclass(frozen=True)
class Moments:
    """Of one prompt's gradient estimate, for every prompt."""

    mean_QD: Tensor
    cov_QDD: Tensor

    @property
    def total(self) -> Tensor:
        """H = Cov_q(mu_q) + E_q[Cov_G]: covariance over prompts and outputs."""
        between_QD = self.mean_QD - self.mean_QD.mean(0)
        return between_QD.mT @ between_QD / len(between_QD) + self.cov_QDD.mean(0)

    @property
    def trace(self) -> float:
        """Tr H."""
        return float(self.total.trace())


def groups(O: int, G: int) -> Tensor:
    """(B, G) indices of all ordered groups with repetition."""
    return torch.tensor(list(product(range(O), repeat=G)))


def named(name: str) -> BaselineFunction:
    """A baseline of `oblrpo.estimators` that knows a group's rewards, score norms and lengths only."""

    def of(rewards_BG: Tensor, norm2_BG: Tensor) -> Tensor:
        needs = estimators.BASELINES[name].needs
        inputs: dict[str, Any] = {"norm2_PG": norm2_BG, "length_PG": torch.ones_like(norm2_BG)}
        return estimators.baseline(name, rewards_BG, **{key: inputs[key] for key in needs})

    return of


def group_moments(world: World, baseline: BaselineFunction, G: int, sampler_QO: Tensor | None = None) -> Moments:
    """Mean and covariance of g = (1/G) sum_j rho_j (F_j - b_j) s_j over all groups of every prompt.

    Args:
        world: the policy.
        baseline: of groups.
        G: outputs a group.
        sampler_QO: probabilities that outputs were sampled from; rho = pi / sampler, in the baseline's weights too.
    """
    index_BG = groups(world.rewards_QO.shape[1], G)
    sampler_QO = world.pi_QO if sampler_QO is None else sampler_QO
    rho_QO = world.pi_QO / sampler_QO
    means, covs = [], []
    for q, rewards_O in enumerate(world.rewards_QO):
        rewards_BG, rho_BG = rewards_O[index_BG], rho_QO[q][index_BG]
        baseline_BG = baseline(rewards_BG, world.norm2_QO[q][index_BG] * rho_BG.square())
        chance_B = sampler_QO[q][index_BG].prod(1)
        coef_BG = rho_BG * (rewards_BG - baseline_BG) / G
        gradient_BD = torch.einsum("bg,bgd->bd", coef_BG, world.score_QOD[q][index_BG])
        mean_D = chance_B @ gradient_BD
        means.append(mean_D)
        covs.append(torch.einsum("b,bd,be->de", chance_B, gradient_BD, gradient_BD) - torch.outer(mean_D, mean_D))
    return Moments(torch.stack(means), torch.stack(covs))


def every_gradient(world: World, baseline: BaselineFunction, G: int) -> list[tuple[float, Tensor]]:
    """(chance, gradient estimate) of every prompt and every group of its outputs, one prompt a batch."""
    index_BG, found = groups(world.rewards_QO.shape[1], G), []
    for q, rewards_O in enumerate(world.rewards_QO):
        rewards_BG = rewards_O[index_BG]
        coef_BG = (rewards_BG - baseline(rewards_BG, world.norm2_QO[q][index_BG])) / G
        gradient_BD = torch.einsum("bg,bgd->bd", coef_BG, world.score_QOD[q][index_BG])
        chance_B = world.pi_QO[q][index_BG].prod(1) / len(world.rewards_QO)
        found += list(zip(chance_B.tolist(), gradient_BD, strict=True))
    return found


def fixed_baseline_moments(world: World, baseline_Q: Tensor, G: int) -> Moments:
    """The same for b(q), by theorem 2: mu = E[F s], Cov = (1/G) (E[(F - b)^2 s s'] - mu mu')."""
    mean_QD = policy_gradients(world)
    return Moments(mean_QD, (weighted_fisher(world, world.rewards_QO - baseline_Q[:, None]) - _outer(mean_QD)) / G)


def rloo_moments(world: World, G: int) -> Moments:
    """Of RLOO, by formula: Cov = (1/G) (K - mu mu') + (1 / (G (G-1))) (sigma^2 Phi + mu mu')."""
    mean_QD = policy_gradients(world)
    centred_QO = world.rewards_QO - world.mean(world.rewards_QO)[:, None]
    variance_Q = world.mean(centred_QO.square())
    fisher_QDD = weighted_fisher(world, torch.ones_like(centred_QO))
    first = weighted_fisher(world, centred_QO) - _outer(mean_QD)
    second = variance_Q[:, None, None] * fisher_QDD + _outer(mean_QD)
    return Moments(mean_QD, first / G + second / (G * (G - 1)))


def policy_gradients(world: World) -> Tensor:
    """Mu_q = E[F s | q], (Q, D)."""
    return world.mean(world.rewards_QO[..., None] * world.score_QOD)


def weighted_fisher(world: World, factor_QO: Tensor) -> Tensor:
    """E[factor^2 s s' | q], (Q, D, D)."""
    weight_QO = world.pi_QO * factor_QO.square()
    return torch.einsum("qo,qod,qoe->qde", weight_QO, world.score_QOD, world.score_QOD)


def optimal_baseline(world: World) -> Tensor:
    """B*(q) = E[w F] / E[w], (Q,)."""
    return world.mean(world.norm2_QO * world.rewards_QO) / world.mean(world.norm2_QO)


def _outer(mean_QD: Tensor) -> Tensor:
    return mean_QD[:, :, None] * mean_QD[:, None, :]
