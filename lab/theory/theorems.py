"""Theorems 1, 2 and 7 and assumptions 1 and 4, each computed on a policy that is enumerated to the last output."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from lab.theory import exact
from lab.theory.claims import Claim, same
from lab.theory.worlds import World
from oblrpo import estimators


def baselines_leave_their_output_out() -> list[Claim]:
    """Assumption 1: b_j does not depend on output j, for every baseline that claims to be unbiased and for no other."""
    names = estimators.BASELINES
    saying = [name for name in names if names[name].unbiased]
    kept = {name: not estimators.depends_on_own_output(name) for name in names}
    return [
        Claim("A1: unbiased baselines leave output j out of b_j", "paper", float(len(saying)),
              float(sum(kept[name] for name in saying)), note=f"{', '.join(saying)}: how many do"),
        Claim("A1: the other baselines do too", "rivals", float(len(names) - len(saying)),
              float(sum(kept[name] for name in names if name not in saying)),
              note=f"{', '.join(name for name in names if name not in saying)}: how many do"),
    ]  # fmt: skip


def baselines_are_bounded(world: World, name: str, G: int) -> Claim:
    """Assumption 4: |F| <= B bounds the baseline too, which is a weighted mean of rewards."""
    index_BG = exact.groups(world.rewards_QO.shape[1], G)
    largest = 0.0
    for rewards_O, norm2_O in zip(world.rewards_QO, world.norm2_QO, strict=True):
        baseline_BG = exact.named(name)(rewards_O[index_BG], norm2_O[index_BG], torch.ones(index_BG.shape).double())
        largest = max(largest, float(baseline_BG.abs().max()))
    return Claim(f"A4: |b| <= B, {name}", "paper", float(world.rewards_QO.abs().max()), largest, "<=",
                 note=f"{world.name}, every group of {G}")  # fmt: skip


def unbiased(world: World, name: str, G: int, sampler_QO: Tensor | None = None) -> Claim:
    """Theorem 1: g = (1/G) sum_j rho_j (F_j - b_j) s_j has mean grad J where b_j does not depend on output j."""
    mean_D = exact.group_moments(world, exact.named(name), G, sampler_QO).mean_QD.mean(0)
    off = "" if sampler_QO is None else ", off-policy"
    return same(f"T1: {name} is unbiased{off}", "paper", world.gradient_D, mean_D, f"{world.name}, G = {G}")


def unbiased_across_prompts(world: World, name: str, G: int = 2) -> Claim:
    """Theorem 1 for a baseline that borrows from other prompts of the batch, over every batch of two prompts."""
    first, second = world.rewards_QO[:2]
    index_BG = exact.groups(len(first), G)
    mean_D = torch.zeros_like(world.theta_D)
    for one_G, two_G in product(index_BG, index_BG):
        rewards_PG = torch.stack([first[one_G], second[two_G]])
        norm2_PG = torch.stack([world.norm2_QO[0][one_G], world.norm2_QO[1][two_G]])
        inputs = estimators.baseline_inputs(torch.ones_like(norm2_PG)[..., None], norm2_PG)
        coef_PG = (rewards_PG - estimators.baseline(name, rewards_PG, prior=None, **inputs)) / G / 2
        chance = world.pi_QO[0][one_G].prod() * world.pi_QO[1][two_G].prod()
        score_PGD = torch.stack([world.score_QOD[0][one_G], world.score_QOD[1][two_G]])
        mean_D += chance * torch.einsum("pg,pgd->d", coef_PG, score_PGD)
    claimed_D = exact.policy_gradients(world)[:2].mean(0)
    return same(f"T1: {name} is unbiased", "derived", claimed_D, mean_D, f"{world.name}, 2 prompts, G = {G}")


def fixed_baseline_covariance(world: World, G: int, baseline_Q: Tensor) -> Claim:
    """Theorem 2: for a fixed b, Cov_G = (1/G) (E[(F - b)^2 s s'] - mu mu')."""
    formula_QDD = exact.fixed_baseline_moments(world, baseline_Q, G).cov_QDD
    found_QDD = [
        exact.group_moments(world.only(q), exact.fixed(float(b)), G).cov_QDD[0] for q, b in enumerate(baseline_Q)
    ]
    return same("T2: covariance with a fixed baseline", "paper", formula_QDD, torch.stack(found_QDD),
                f"{world.name}, G = {G}")  # fmt: skip


def rloo_covariance(world: World, G: int) -> Claim:
    """Theorem 2: the covariance of RLOO is (1/G) (K - mu mu') + (1/(G(G-1))) (sigma^2 Phi + mu mu')."""
    found_QDD = exact.group_moments(world, exact.named("rloo"), G).cov_QDD
    return same("T2: covariance of RLOO", "derived", exact.rloo_moments(world, G).cov_QDD, found_QDD,
                f"{world.name}, G = {G}")  # fmt: skip


def batch_covariance(world: World, N: int, G: int) -> Claim:
    """Theorem 2: the covariance of the batch gradient is H/N with H = Cov_q(mu_q) + E_q[Cov_G]."""
    chance_B, gradient_BND = exact.batches(*exact.prompt_gradients(world, exact.named("rloo"), G), N)
    batch_BD = gradient_BND.mean(1)
    mean_D = chance_B @ batch_BD
    cov_DD = torch.einsum("b,bd,be->de", chance_B, batch_BD, batch_BD) - torch.outer(mean_D, mean_D)
    claimed_DD = exact.group_moments(world, exact.named("rloo"), G).total / N
    return same("T2: covariance of the batch is H / N", "paper", claimed_DD, cov_DD, f"{world.name}, N = {N}, G = {G}")


def group_mean_is_scaled_rloo(world: World, G: int) -> list[Claim]:
    """The group mean's gradient is (G-1)/G times RLOO's, group by group, and so its SNR is the same."""
    rewards_BG = world.rewards_QO[0][exact.groups(world.rewards_QO.shape[1], G)]
    of = {name: rewards_BG - estimators.baseline(name, rewards_BG) for name in ("mean", "rloo")}
    moments = {name: exact.group_moments(world, exact.named(name), G) for name in of}
    snr = {name: float(each.mean_QD.mean(0).square().sum()) / each.trace for name, each in moments.items()}
    return [
        same("group mean = (G-1)/G RLOO", "derived", (G - 1) / G * of["rloo"], of["mean"],
             f"{world.name}, every group of {G}"),
        Claim("group mean: the same SNR as RLOO", "derived", snr["rloo"], snr["mean"], note=f"{world.name}, G = {G}"),
    ]  # fmt: skip


def optimal_baseline(world: World, G: int = 1, sampler_QO: Tensor | None = None) -> Claim:
    """Theorem 7: b*(q) = E[w F] / E[w] minimises tr H, the vertex of the parabola through three enumerated traces.

    Off-policy the weights are rho^2 w: b* = E_old[rho^2 w F] / E_old[rho^2 w].
    """
    found = []
    for q in range(len(world.rewards_QO)):
        alone, sampler_1O = world.only(q), None if sampler_QO is None else sampler_QO[q : q + 1]
        found.append(vertex(lambda b: exact.group_moments(alone, exact.fixed(b), G, sampler_1O).trace))  # noqa: B023
    off = "" if sampler_QO is None else ", off-policy: E[rho^2 w F] / E[rho^2 w]"
    claimed_Q = exact.optimal_baseline(world, sampler_QO)
    return same(f"T7: b* = E[w F] / E[w]{off}", "paper" if sampler_QO is None else "derived", claimed_Q,
                torch.tensor(found, dtype=torch.float64), f"{world.name}, G = {G}: argmin of tr H")  # fmt: skip


def optimal_baseline_beats(world: World, G: int) -> Claim:
    """Theorem 7: no fixed baseline is quieter than b*; the expected reward, the limit of RLOO's, is one of them."""
    best = exact.fixed_baseline_moments(world, exact.optimal_baseline(world), G).trace
    mean = exact.fixed_baseline_moments(world, world.mean(world.rewards_QO), G).trace
    return Claim("T7: tr H under b* against E F", "paper", mean, best, "<=", note=f"{world.name}, G = {G}")


def vertex(f: Callable[[float], float]) -> float:
    """The argument at which a parabola is least."""
    left, middle, right = f(-1.0), f(0.0), f(1.0)
    curvature = left - 2 * middle + right
    return (left - right) / (2 * curvature) if curvature > 0 else math.nan
