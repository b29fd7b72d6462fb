"""What follows from the theorems for estimators that exist: worked out for this project, checked by enumeration."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jacrev

from oblrpo import estimators
from oblrpo.theory import exact
from oblrpo.theory.claims import Claim
from oblrpo.theory.worlds import World


def leverage(world: World, G: int) -> Claim:
    """F_j - b_j = (F_j - b_full) / (1 - h_j), h_j = w_j / sum w: leave-one-out in O(G).

    Where 1 - h_j > 1e-4: one weight that is nearly all costs the quotient its digits.
    """
    index_BG = exact.groups(world.rewards_QO.shape[1], G)
    rewards_BG, norm2_BG = world.rewards_QO[0][index_BG], world.norm2_QO[0][index_BG]
    full_B1 = (norm2_BG * rewards_BG).sum(1, keepdim=True) / norm2_BG.sum(1, keepdim=True)
    rest_BG = 1 - norm2_BG / norm2_BG.sum(1, keepdim=True)
    claimed_BG = (rewards_BG - full_B1) / rest_BG
    others = 1 - torch.eye(G, dtype=torch.float64)
    direct_BG = rewards_BG - (norm2_BG * rewards_BG) @ others / (norm2_BG @ others)
    gap = float((claimed_BG - direct_BG)[rest_BG > 1e-4].abs().max())
    return Claim("leverage form of leave-one-out", "derived", 0.0, gap, note=f"{world.name}, every group of {G}")


def in_sample_is_biased(world: World, G: int) -> Claim:
    """E g - grad J = -E[w (F - b*) s] / (G E w) + O(1/G^2) in sample: what is left over falls faster than 1/G."""
    weight_Q = world.mean(world.norm2_QO)
    centred_QO = world.norm2_QO * (world.rewards_QO - exact.optimal_baseline(world)[:, None])
    limit_D = -(world.mean(centred_QO[..., None] * world.score_QOD) / weight_Q[:, None]).mean(0)

    def left_over(G: int) -> float:
        bias_D = exact.group_moments(world, exact.named("eob"), G).mean_QD.mean(0) - world.gradient_D
        return float((G * bias_D - limit_D).norm() / limit_D.norm())

    note = f"{world.name}: |G bias - limit| / |limit| at G = {G} over that at G = {G // 2}; 1/2 to first order"
    ratio = left_over(G) / left_over(G // 2)
    return Claim("in-sample exact weights are biased by -E[w(F-b*)s]/(G E w)", "derived", 0.75, ratio, "<=", note=note)


def in_sample_is_not_unbiased(world: World, G: int) -> Claim:
    """The statement that in-sample weights are unbiased, which is false."""
    moments = exact.group_moments(world, exact.named("eob"), G)
    gap = float((moments.mean_QD.mean(0) - world.gradient_D).norm() / world.gradient_D.norm())
    return Claim("in-sample exact weights are unbiased", "rivals (OPO, OTB, VCPO)", 0.0, gap,
                 note=f"{world.name}, G = {G}: |E g - grad J| / |grad J|")  # fmt: skip


def truncated_importance(world: World, sampler_QO: Tensor, cut: float, baseline: float) -> Claim:
    """With rho cut at `cut`, a baseline adds the bias -b E[rho_cut s]: 0 for exact weights, not for these."""
    rho_QO = (world.pi_QO / sampler_QO).clamp(max=cut)
    mean = lambda value_QO: torch.einsum("qo,qo,qod->d", sampler_QO, rho_QO * value_QO, world.score_QOD) / len(rho_QO)  # noqa: E731
    with_b, without = mean(world.rewards_QO - baseline), mean(world.rewards_QO)
    ones_D = mean(torch.ones_like(rho_QO))
    gap = float((with_b - without + baseline * ones_D).abs().max())
    size = float((baseline * ones_D).norm() / world.gradient_D.norm())
    note = f"{world.name}, rho cut at {cut}: a bias of {size:.2g} |grad J|"
    return Claim("truncated weights: a baseline adds -b E[rho_cut s]", "derived", 0.0, gap, note=note)


def kl_forms(world: World, reference_QO: Tensor, beta: float) -> list[Claim]:
    """Which objective each form of the KL penalty descends: k1 in the reward, k2 and k3 as losses on samples."""
    log_ratio_QO = world.logp_QO - reference_QO.log()

    def score_form(coef_QO: Tensor) -> Tensor:
        return world.mean(coef_QO[..., None] * world.score_QOD).mean(0)

    def penalised(theta_D: Tensor) -> Tensor:
        logp_QO = world.logp(theta_D)
        return (logp_QO.exp() * (world.rewards_QO - beta * (logp_QO - reference_QO.log()))).sum(1).mean()

    def reverse(theta_D: Tensor) -> Tensor:
        logp_QO = world.logp(theta_D)
        return (logp_QO.exp() * (logp_QO - reference_QO.log())).sum(1).mean()

    def forward(theta_D: Tensor) -> Tensor:
        return (reference_QO * (reference_QO.log() - world.logp(theta_D))).sum(1).mean()

    pairs = (
        (
            "k1 in the reward: grad (J - beta KL(pi||ref))",
            score_form(world.rewards_QO - beta * log_ratio_QO),
            penalised,
        ),
        ("k2 as a loss: grad KL(pi||ref)", score_form(log_ratio_QO), reverse),
        ("k3 as a loss: grad KL(ref||pi)", score_form(1 - reference_QO / world.pi_QO), forward),
    )
    return [
        Claim(name, "derived", 0.0, float((found - jacrev(of)(world.theta_D)).abs().max()), note=world.name)
        for name, found, of in pairs
    ]


def shift_leaves_the_hessian(world: World, shift: float) -> Claim:
    """E[grad^2 log pi] = -Phi: adding a constant to F leaves grad^2 J = E[F (grad^2 log pi + s s')] as it is."""
    outer = torch.einsum("qod,qoe->qode", world.score_QOD, world.score_QOD)
    formula = world.mean((world.rewards_QO + shift)[..., None, None] * (world.curvature_QODD + outer)).mean(0)
    gap = float((formula - world.hessian_DD).abs().max())
    return Claim("a constant in F leaves grad^2 J alone", "derived", 0.0, gap, note=f"{world.name}, shift {shift}")


def noise_scale(world: World, N: int, G: int, c: float) -> Claim:
    """The bound's best step gains Delta_max / (1 + B_noise / N) with B_noise = 1 / SNR (McCandlish et al. 2018)."""
    signal2, trace = float(world.gradient_D.square().sum()), exact.rloo_moments(world, G).trace
    moments = estimators.Moments(signal2, trace, N)
    gain = lambda noise: signal2**2 / (2 * c * (signal2 + noise))  # noqa: E731
    claimed = gain(0.0) / (1 + moments.critical_batch_size / N)
    return Claim("gradient noise scale: gain of the best step", "McCandlish et al. 2018", claimed, gain(trace / N),
                 note=f"{world.name}, N = {N}, critical batch {moments.critical_batch_size:.3g} prompts")  # fmt: skip


def plugin_floor(batches: int = 4000, N: int = 16, D: int = 64, seed: int = 0) -> list[Claim]:
    """N SNR from plug-ins is about 1 too high: without signal the plug-in factor is near 1/2, the debiased near 0."""
    generator = torch.Generator().manual_seed(seed)
    gradient_BND = torch.randn(batches, N, D, generator=generator, dtype=torch.float64)
    norm2_B = gradient_BND.mean(1).square().sum(1)
    trace_B = N / (N - 1) * (gradient_BND.square().sum(2).mean(1) - norm2_B)
    plugin_B = 1 / (1 + trace_B / (N * norm2_B))
    debiased_B = (1 - trace_B / (N * norm2_B)).clamp(min=0)
    claims = []
    for name, factor_B, edge, relation in (
        ("stays near 1/2 with plug-ins", plugin_B, 0.45, ">="),
        ("falls to 0.1, debiased", debiased_B, 0.1, "<="),
    ):
        margin, mean = 1.96 * float(factor_B.std()) / batches**0.5, float(factor_B.mean())
        note = f"{batches} batches of {N} pure-noise gradients in {D} dimensions: {mean:.3f} +- {margin:.3f}"
        claims.append(Claim(f"without signal the factor {name}", "derived", edge, mean, relation, note=note))  # type: ignore[arg-type]
    return claims


def when_leave_one_out_loses(worlds: list[World], G: int) -> Claim:
    """Plain leave-one-out beats RLOO roughly iff Cov(F,w)^2/E[w]^2 > (E[w^2 (F-b*)^2]/E[w]^2 - Var F) / (G-1)."""
    right = 0
    for world in worlds:
        loo, rloo = (exact.group_moments(world, exact.named(name), G).cov_QDD for name in ("oblr", "rloo"))
        wins = float((loo - rloo).diagonal(dim1=1, dim2=2).sum()) < 0
        right += wins == (_advantage(world, G) > 0)
    share = right / len(worlds)
    note = f"{len(worlds)} random policies of one prompt, G = {G}: share of which the sign is as predicted"
    return Claim("when leave-one-out beats RLOO", "derived", 0.75, share, ">=", note=note)


def _advantage(world: World, G: int) -> float:
    weight_Q, F, w = world.mean(world.norm2_QO), world.rewards_QO, world.norm2_QO
    mean_Q = world.mean(F)
    covariance_Q = world.mean(w * F) - weight_Q * mean_Q
    spread_Q = world.mean((w * (F - exact.optimal_baseline(world)[:, None])).square()) / weight_Q**2
    variance_Q = world.mean(F.square()) - mean_Q**2
    return float((covariance_Q**2 / weight_Q**2 - (spread_Q - variance_Q) / (G - 1)).sum())
