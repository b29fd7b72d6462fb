"""The paper's theorems and what they rest on, each computed on a policy that is enumerated to the last output."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.theory import exact
from oblrpo.theory.claims import Claim
from oblrpo.theory.worlds import World


def unbiased(world: World, name: str, G: int, sampler_QO: Tensor | None = None) -> Claim:
    """T1: g = (1/G) sum_j rho_j (F_j - b_j) s_j has mean grad J where b_j does not depend on output j."""
    moments = exact.group_moments(world, exact.named(name), G, sampler_QO)
    gap = float((moments.mean_QD.mean(0) - world.gradient_D).abs().max())
    off = "" if sampler_QO is None else ", off-policy"
    return Claim(
        f"T1: {name} is unbiased{off}", "paper", 0.0, gap, note=f"{world.name}, G = {G}: largest |E g - grad J|"
    )


def unbiased_across_prompts(world: World, name: str, G: int = 2) -> Claim:
    """T1 of a baseline that borrows from the batch's other prompts: every batch of two prompts, all their groups."""
    first, second = world.rewards_QO[:2]
    index_BG = exact.groups(len(first), G)
    mean_D = torch.zeros_like(world.theta_D)
    for one_G, two_G in product(index_BG, index_BG):
        rewards_PG = torch.stack([first[one_G], second[two_G]])
        norm2_PG = torch.stack([world.norm2_QO[0][one_G], world.norm2_QO[1][two_G]])
        needs: dict[str, Any] = {"norm2_PG": norm2_PG} if "norm2_PG" in estimators.BASELINES[name].needs else {}
        coef_PG = (rewards_PG - estimators.baseline(name, rewards_PG, **needs)) / G / 2
        chance = world.pi_QO[0][one_G].prod() * world.pi_QO[1][two_G].prod()
        score_PGD = torch.stack([world.score_QOD[0][one_G], world.score_QOD[1][two_G]])
        mean_D += chance * torch.einsum("pg,pgd->d", coef_PG, score_PGD)
    gap = float((mean_D - exact.policy_gradients(world)[:2].mean(0)).abs().max())
    return Claim(f"T1: {name} is unbiased", "derived", 0.0, gap, note=f"{world.name}, 2 prompts, G = {G}")


def fixed_baseline_covariance(world: World, G: int, baseline_Q: Tensor) -> Claim:
    """T2: for a fixed b, Cov_G = (1/G) (E[(F - b)^2 s s'] - mu mu')."""
    formula = exact.fixed_baseline_moments(world, baseline_Q, G).cov_QDD
    gaps = [
        (exact.group_moments(_only(world, q), lambda rewards_BG, _: torch.full_like(rewards_BG, float(b)), G).cov_QDD[0]  # noqa: B023
         - formula[q]).abs().max()
        for q, b in enumerate(baseline_Q)
    ]  # fmt: skip
    return Claim("T2: covariance with a fixed baseline", "paper", 0.0, float(max(gaps)), note=f"{world.name}, G = {G}")


def rloo_covariance(world: World, G: int) -> Claim:
    """T2: RLOO's Cov = (1/G) (K - mu mu') + (1/(G(G-1))) (sigma^2 Phi + mu mu')."""
    moments = exact.group_moments(world, exact.named("rloo"), G)
    gap = float((moments.cov_QDD - exact.rloo_moments(world, G).cov_QDD).abs().max())
    return Claim("T2: covariance of RLOO", "derived", 0.0, gap, note=f"{world.name}, G = {G}")


def batch_covariance(world: World, N: int, G: int) -> Claim:
    """T2: the batch gradient's covariance is H/N, H = Cov_q(mu_q) + E_q[Cov_G]: every batch of N prompts."""
    moments = exact.group_moments(world, exact.named("rloo"), G)
    found = exact.every_gradient(world, exact.named("rloo"), G)
    chance_K = torch.tensor([chance for chance, _ in found], dtype=torch.float64)
    gradient_KD = torch.stack([gradient_D for _, gradient_D in found])
    chance, total = chance_K, gradient_KD
    for _ in range(N - 1):
        chance = (chance[:, None] * chance_K).flatten()
        total = (total[:, None] + gradient_KD).flatten(0, 1)
    mean_D = chance @ total / N
    cov_DD = torch.einsum("k,kd,ke->de", chance, total, total) / N**2 - torch.outer(mean_D, mean_D)
    gap = float((cov_DD - moments.total / N).abs().max())
    return Claim("T2: covariance of the batch is H / N", "paper", 0.0, gap, note=f"{world.name}, N = {N}, G = {G}")


def group_mean_is_scaled_rloo(world: World, G: int) -> Claim:
    """The group mean's gradient is (G-1)/G times RLOO's, group by group."""
    rewards_BG = world.rewards_QO[0][exact.groups(world.rewards_QO.shape[1], G)]
    of = {name: rewards_BG - estimators.baseline(name, rewards_BG) for name in ("mean", "rloo")}
    gap = float((of["mean"] - (G - 1) / G * of["rloo"]).abs().max())
    return Claim("group mean = (G-1)/G RLOO", "derived", 0.0, gap, note=f"{world.name}, every group of {G}")


def loss_bound(world: World, rates: list[float], c: float) -> Claim:
    """T3: E L(th_T) <= L(th_0) - sum_t eta_t E||grad L||^2 + (c/2) sum_t eta_t^2 E(||grad L||^2 + tr H / N), N = G = 1.

    Every run of T updates that one sampled output each can make, b = 0.
    """
    nodes = [(1.0, world)]
    bound = -float(world.objective(world.theta_D))
    for rate in rates:
        following = []
        for chance, here in nodes:
            moments = exact.fixed_baseline_moments(here, torch.zeros(len(here.rewards_QO), dtype=torch.float64), 1)
            signal2 = float(here.gradient_D.square().sum())
            bound += chance * (-rate * signal2 + c / 2 * rate**2 * (signal2 + moments.trace))
            for q, o in product(*map(range, here.rewards_QO.shape)):
                step_D = rate * here.rewards_QO[q, o] * here.score_QOD[q, o]
                weight = chance * float(here.pi_QO[q, o]) / len(here.rewards_QO)
                following.append((weight, here.at(here.theta_D + step_D)))
        nodes = following
    loss = -sum(chance * float(here.objective(here.theta_D)) for chance, here in nodes)
    note = f"{world.name}, {len(rates)} steps at {rates[0]:g}, c = osc(F) L: E L(th_T) against the bound"
    return Claim("T3: the loss bound", "paper", bound, loss, "<=", note=note)


def best_rate(world: World, N: int, G: int, c: float) -> Claim:
    """T4: the eta that minimises T3's step is (1/c) N SNR / (1 + N SNR): where the derivative is 0, by bisection."""
    signal2 = float(world.gradient_D.square().sum())
    trace = exact.rloo_moments(world, G).trace
    snr = signal2 / trace

    def slope(rate: float) -> float:
        eta = torch.tensor(rate, dtype=torch.float64, requires_grad=True)
        (-eta * signal2 + c / 2 * eta.square() * (signal2 + trace / N)).backward()
        assert eta.grad is not None
        return float(eta.grad)

    low, high = 0.0, 2 / c
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    note = f"{world.name}, N = {N}, G = {G}, N SNR = {N * snr:.3g}"
    return Claim("T4: the rate that minimises the bound", "paper", N * snr / (1 + N * snr) / c, low, note=note)


def schedule_uses_it(world: World, N: int, G: int) -> Claim:
    """T4: `SNRSchedule`, told the exact moments, sets the rate of the theorem."""
    signal2, trace = float(world.gradient_D.square().sum()), exact.rloo_moments(world, G).trace
    schedule = estimators.SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), ema=0.0)
    factor = schedule.step(estimators.Moments(signal2, trace, N))
    n_snr = N * signal2 / trace
    return Claim("T4: SNRSchedule's factor", "paper", n_snr / (1 + n_snr), factor, note=f"{world.name}, exact moments")


def optimal_baseline(world: World, G: int = 1) -> Claim:
    """T7: b*(q) = E[w F] / E[w] minimises tr H: the vertex of the parabola through three enumerated traces."""
    gap = 0.0
    for q, claimed in enumerate(exact.optimal_baseline(world)):
        gap = max(gap, abs(_vertex(lambda b: _trace(_only(world, q), b, G)) - float(claimed)))  # noqa: B023
    return Claim("T7: b* = E[w F] / E[w]", "paper", 0.0, gap, note=f"{world.name}, G = {G}: largest |argmin tr H - b*|")


def optimal_baseline_beats(world: World, G: int) -> Claim:
    """T7: no fixed baseline is quieter than b*; the expected reward, the limit of RLOO's, is one of them."""
    best = exact.fixed_baseline_moments(world, exact.optimal_baseline(world), G).trace
    mean = exact.fixed_baseline_moments(world, world.mean(world.rewards_QO), G).trace
    return Claim("T7: tr H under b* against E F", "paper", mean, best, "<=", note=f"{world.name}, G = {G}")


def true_kl_baseline(world: World, beta: float, differentiated: bool) -> Claim:
    """With F~ = F - beta log(pi/ref) the best b is E[w F~]/E[w], less beta if the log-ratio is differentiated too."""
    reference_QO = torch.full_like(world.pi_QO, 1 / world.pi_QO.shape[1])
    penalised = world.paid(world.rewards_QO - beta * (world.logp_QO - reference_QO.log()))
    gap = 0.0
    for q, of_reward in enumerate(exact.optimal_baseline(penalised)):
        alone, extra = _only(penalised, q), beta if differentiated else 0.0
        found = _vertex(lambda b: _trace(alone, b + extra, 1))  # noqa: B023
        gap = max(gap, abs(found - (float(of_reward) - extra)))
    how = "b* - beta, log-ratio differentiated" if differentiated else "E[w F~] / E[w]"
    return Claim(f"KL in the reward: best baseline {how}", "derived", 0.0, gap, note=f"{world.name}, beta = {beta}")


def _only(world: World, q: int) -> World:
    """One prompt of it."""
    return World(world.name, lambda theta: world.logp(theta)[q : q + 1], world.theta_D, world.rewards_QO[q : q + 1])


def _trace(world: World, baseline: float, G: int) -> float:
    return exact.group_moments(world, lambda rewards_BG, _: torch.full_like(rewards_BG, baseline), G).trace


def _vertex(f: Callable[[float], float]) -> float:
    """Where a parabola is least."""
    left, middle, right = f(-1.0), f(0.0), f(1.0)
    curvature = left - 2 * middle + right
    return (left - right) / (2 * curvature) if curvature > 0 else math.nan
