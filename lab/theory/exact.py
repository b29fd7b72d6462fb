"""Exact mean and covariance of gradient estimators: every group of G outputs that could have been sampled, weighed.

Q prompts, O outputs, D parameters, G outputs a group, B = O^G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import torch
from torch import Tensor

from lab.theory.worlds import World
from oblrpo import estimators

BaselineFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps rewards_BG, norm2_BG and rho_BG of B independent groups to baseline_BG."""


@dataclass(frozen=True)
class ExactMoments:
    """Mean and covariance of one prompt's gradient estimate, for every prompt."""

    mean_QD: Tensor
    cov_QDD: Tensor

    @property
    def total(self) -> Tensor:
        """Covariance over prompts and outputs, H = Cov_q(mu_q) + E_q[Cov_G]."""
        between_QD = self.mean_QD - self.mean_QD.mean(0)
        return between_QD.mT @ between_QD / len(between_QD) + self.cov_QDD.mean(0)

    @property
    def trace(self) -> float:
        """Trace of the covariance over prompts and outputs."""
        return float(self.total.trace())


def groups(O: int, G: int) -> Tensor:
    """Indices of all ordered groups of G outputs with repetition, (B, G)."""
    return torch.tensor(list(product(range(O), repeat=G)))


def counts(pi_O: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """How often each output can occur among n, (B, O), and how likely that is, (B,): n! prod_o pi_o^c_o / c_o!.

    What does not depend on the order of outputs has its mean over far fewer of these than there are groups.
    """
    O = len(pi_O)
    if n < O:
        chosen_BN = torch.tensor(list(combinations_with_replacement(range(O), n)), dtype=torch.int64)
        counts_BO = torch.nn.functional.one_hot(chosen_BN, O).sum(1).double()
    else:  # bars between stars
        bars = torch.combinations(torch.arange(n + O - 1, dtype=torch.float64), O - 1)
        ends = torch.full((len(bars), 1), n + O - 1, dtype=torch.float64)
        counts_BO = torch.diff(bars, prepend=torch.full_like(ends, -1), append=ends) - 1
    log_ways_B = math.lgamma(n + 1) - torch.lgamma(counts_BO + 1).sum(1)
    return counts_BO, (log_ways_B + torch.xlogy(counts_BO, pi_O).sum(1)).exp()


def named(name: str) -> BaselineFunction:
    """A baseline of `oblrpo.estimators` that knows a group's rewards, score norms, importance weights and lengths."""

    def of(rewards_BG: Tensor, norm2_BG: Tensor, rho_BG: Tensor) -> Tensor:
        inputs = estimators.baseline_inputs(torch.ones_like(norm2_BG)[..., None], norm2_BG)  # outputs of one token
        return estimators.baseline(name, rewards_BG, rho_PG=rho_BG, prior=None, **inputs)

    return of


def fixed(baseline: float) -> BaselineFunction:
    """A baseline that is one number for every output."""
    return lambda rewards_BG, *_: torch.full_like(rewards_BG, baseline)


def group_moments(
    world: World, baseline: BaselineFunction, G: int, sampler_QO: Tensor | None = None, cut: float = math.inf
) -> ExactMoments:
    """Mean and covariance of g = (1/G) sum_j rho_j (F_j - b_j) s_j over all groups of every prompt.

    Args:
        world: the policy.
        baseline: baseline of each output, from its group.
        G: outputs a group.
        sampler_QO: probabilities that outputs were sampled with; rho = pi / sampler, in the baseline's weights too.
        cut: truncates rho.
    """
    means, covs = [], []
    for q in range(len(world.rewards_QO)):
        chance_B, gradient_BD = group_gradients(world, q, baseline, G, sampler_QO, cut)
        mean_D = chance_B @ gradient_BD
        means.append(mean_D)
        covs.append(torch.einsum("b,bd,be->de", chance_B, gradient_BD, gradient_BD) - torch.outer(mean_D, mean_D))
    return ExactMoments(torch.stack(means), torch.stack(covs))


def group_gradients(
    world: World, q: int, baseline: BaselineFunction, G: int, sampler_QO: Tensor | None = None, cut: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Chance and gradient estimate of every group of G outputs of prompt q, (chance_B, gradient_BD)."""
    index_BG = groups(world.rewards_QO.shape[1], G)
    sampler_O = world.pi_QO[q] if sampler_QO is None else sampler_QO[q]
    rho_BG = (world.pi_QO[q] / sampler_O).clamp(max=cut)[index_BG]
    rewards_BG = world.rewards_QO[q][index_BG]
    baseline_BG = baseline(rewards_BG, world.norm2_QO[q][index_BG], rho_BG)
    coef_BG = rho_BG * (rewards_BG - baseline_BG) / G
    return sampler_O[index_BG].prod(1), torch.einsum("bg,bgd->bd", coef_BG, world.score_QOD[q][index_BG])


def prompt_gradients(world: World, baseline: BaselineFunction, G: int) -> tuple[Tensor, Tensor]:
    """Chance and gradient estimate of every prompt with every group of its outputs, (chance_K, gradient_KD)."""
    Q = len(world.rewards_QO)
    each = [group_gradients(world, q, baseline, G) for q in range(Q)]
    return torch.cat([chance_B for chance_B, _ in each]) / Q, torch.cat([gradient_BD for _, gradient_BD in each])


def batches(chance_K: Tensor, gradient_KD: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Chance and gradients of every batch of N independent draws of these, (chance_B, gradient_BND)."""
    index_BN = groups(len(chance_K), N)
    return chance_K[index_BN].prod(1), gradient_KD[index_BN]


def fixed_baseline_moments(world: World, baseline_Q: Tensor, G: int) -> ExactMoments:
    """Moments under a baseline b(q) by theorem 2: mu = E[F s], Cov = (1/G) (E[(F - b)^2 s s'] - mu mu')."""
    mean_QD = policy_gradients(world)
    return ExactMoments(mean_QD, (weighted_fisher(world, world.rewards_QO - baseline_Q[:, None]) - _outer(mean_QD)) / G)


def rloo_moments(world: World, G: int) -> ExactMoments:
    """Moments of RLOO by formula: Cov = (1/G) (K - mu mu') + (1 / (G (G-1))) (sigma^2 Phi + mu mu')."""
    mean_QD = policy_gradients(world)
    centred_QO = world.rewards_QO - world.mean(world.rewards_QO)[:, None]
    variance_Q = world.mean(centred_QO.square())
    fisher_QDD = weighted_fisher(world, torch.ones_like(centred_QO))
    first = weighted_fisher(world, centred_QO) - _outer(mean_QD)
    second = variance_Q[:, None, None] * fisher_QDD + _outer(mean_QD)
    return ExactMoments(mean_QD, first / G + second / (G * (G - 1)))


def policy_gradients(world: World) -> Tensor:
    """The gradient of each prompt's expected reward, mu_q = E[F s | q], (Q, D)."""
    return world.mean(world.rewards_QO[..., None] * world.score_QOD)


def weighted_fisher(world: World, factor_QO: Tensor) -> Tensor:
    """The weighted Fisher matrix of each prompt, E[factor^2 s s' | q], (Q, D, D)."""
    weight_QO = world.pi_QO * factor_QO.square()
    return torch.einsum("qo,qod,qoe->qde", weight_QO, world.score_QOD, world.score_QOD)


def optimal_baseline(world: World, sampler_QO: Tensor | None = None) -> Tensor:
    """The best baseline b*(q) = E[w F] / E[w], (Q,); off-policy over the sampler, with rho^2 w for w."""
    sampler_QO = world.pi_QO if sampler_QO is None else sampler_QO
    weight_QO = sampler_QO * (world.pi_QO / sampler_QO).square() * world.norm2_QO
    return (weight_QO * world.rewards_QO).sum(1) / weight_QO.sum(1)


def _outer(mean_QD: Tensor) -> Tensor:
    return mean_QD[:, :, None] * mean_QD[:, None, :]
