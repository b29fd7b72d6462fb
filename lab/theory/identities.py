"""What follows from the theorems for estimators that exist: worked out for this project, checked by enumeration."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lab.theory import exact
from lab.theory.claims import Claim, Measurement, romberg, same
from lab.theory.worlds import World


def leverage(world: World, G: int, sampler_QO: Tensor | None = None) -> Claim:
    """The advantage of `oblr` is F_j - b_j = (F_j - b_full) / (1 - h_j), h_j = w_j / sum w; off-policy with rho^2 w.

    Where 1 - h_j > 1e-4: one weight that is nearly all costs the quotient its digits.
    """
    index_BG = exact.groups(world.rewards_QO.shape[1], G)
    rewards_BG, norm2_BG = world.rewards_QO[0][index_BG], world.norm2_QO[0][index_BG]
    rho_BG = torch.ones_like(norm2_BG) if sampler_QO is None else (world.pi_QO / sampler_QO)[0][index_BG]
    weight_BG = rho_BG.square() * norm2_BG
    full_B1 = (weight_BG * rewards_BG).sum(1, keepdim=True) / weight_BG.sum(1, keepdim=True)
    rest_BG = 1 - weight_BG / weight_BG.sum(1, keepdim=True)
    known_BG = rest_BG > 1e-4
    claimed_BG = (rewards_BG - full_B1) / rest_BG
    computed_BG = rewards_BG - exact.named("oblr")(rewards_BG, norm2_BG, rho_BG)
    off = "" if sampler_QO is None else ", off-policy"
    return same(f"leverage form of leave-one-out{off}", "derived", claimed_BG[known_BG], computed_BG[known_BG],
                f"{world.name}, every group of {G}")  # fmt: skip


def in_sample_mean(world: World, q: int, G: int) -> Tensor:
    """Mean gradient of prompt q with b = sum w F / sum w over all G outputs, (D,), by counts of the other outputs."""
    pi_O, F_O, w_O = world.pi_QO[q], world.rewards_QO[q], world.norm2_QO[q]
    counts_BO, chance_B = exact.counts(pi_O, G - 1)
    baseline_BO = ((counts_BO @ (w_O * F_O))[:, None] + w_O * F_O) / ((counts_BO @ w_O)[:, None] + w_O)
    return (pi_O * (F_O - chance_B @ baseline_BO)) @ world.score_QOD[q]


def scaled_bias(world: World, G: int) -> Tensor:
    """The bias in sample times G, G (E g - grad J), (D,)."""
    means = [in_sample_mean(world, q, G) for q in range(len(world.rewards_QO))]
    return G * (torch.stack(means).mean(0) - world.gradient_D)


def limit_of_bias(world: World) -> Tensor:
    """The limit of G times the bias, -E[w (F - b*) s] / E w, (D,)."""
    centred_QO = world.norm2_QO * (world.rewards_QO - exact.optimal_baseline(world)[:, None])
    means_QD = world.mean(centred_QO[..., None] * world.score_QOD) / world.mean(world.norm2_QO)[:, None]
    return -means_QD.mean(0)


def spread(world: World) -> float:
    """The greatest E[w^2] / E[w]^2 of a prompt. An expansion in 1/G holds only for G well above it."""
    return float((world.mean(world.norm2_QO.square()) / world.mean(world.norm2_QO).square()).max())


def in_sample_is_biased(world: World, smallest: int = 32, rounds: int = 4) -> Claim:
    """The bias in sample: G (E g - grad J) -> -E[w (F - b*) s] / E w, extrapolated from G = 32 ... 256."""
    sizes = [smallest * 2**k for k in range(rounds)]
    scaled_GD = torch.stack([scaled_bias(world, G) for G in sizes])
    found_D = torch.tensor([romberg(column_G.tolist()) for column_G in scaled_GD.T], dtype=torch.float64)
    note = f"{world.name}, G to {sizes[-1]}, to 0.1 %: limit of G times the bias; E w^2 / (E w)^2 = {spread(world):.2g}"
    name = "in-sample exact weights: bias -> -E[w(F-b*)s]/(G E w)"
    return replace(same(name, "derived", limit_of_bias(world), found_D, note), tolerance=1e-3)


def small_groups_are_no_guide(world: World, G: int = 8) -> Measurement:
    """How far G times the bias still is from its limit: far, where w is spread."""
    limit_D = limit_of_bias(world)
    off = float((scaled_bias(world, G) - limit_D).norm() / limit_D.norm())
    return Measurement("in sample: |G bias - limit| / |limit|", f"{world.name}, G = {G}", off,
                       note=f"E w^2 / (E w)^2 = {spread(world):.3g}")  # fmt: skip


def in_sample_is_not_unbiased(world: World, G: int) -> Claim:
    """The statement that in-sample weights are unbiased, which is false."""
    mean_D = exact.group_moments(world, exact.named("eob"), G).mean_QD.mean(0)
    return same("in-sample exact weights are unbiased", "rivals (OPO, OTB, VCPO)", world.gradient_D, mean_D,
                f"{world.name}, G = {G}")  # fmt: skip


def in_sample_counts_agree(world: World, G: int) -> Claim:
    """`in_sample_mean`, by counts, against `estimators`' `eob` over every ordered group."""
    claimed_QD = exact.group_moments(world, exact.named("eob"), G).mean_QD
    found = torch.stack([in_sample_mean(world, q, G) for q in range(len(claimed_QD))])
    return same("in-sample mean, by counts of outputs", "derived", claimed_QD, found, f"{world.name}, G = {G}")


def truncated_importance(world: World, sampler_QO: Tensor, cut: float, G: int) -> list[Claim]:
    """With rho cut at `cut`, leave-one-out's mean is E[rho F s] - E[b] E[rho s]: 0 is what E[rho s] no longer is.

    Every group of G, with `oblr` and its cut weights, against expectations over one output and over G - 1.
    """
    found = exact.group_moments(world, exact.named("oblr"), G, sampler_QO, cut).mean_QD
    rho_QO = (world.pi_QO / sampler_QO).clamp(max=cut)
    single_QO = sampler_QO * rho_QO
    plain_QD = torch.einsum("qo,qod->qd", single_QO * world.rewards_QO, world.score_QOD)
    ones_QD = torch.einsum("qo,qod->qd", single_QO, world.score_QOD)
    baseline_Q = torch.stack([_mean_baseline(world, q, sampler_QO[q], rho_QO[q], G) for q in range(len(rho_QO))])
    where = f"{world.name}, rho cut at {cut}, G = {G}"
    return [
        same("truncated weights: a baseline adds -E[b] E[rho_cut s]", "derived",
             plain_QD - baseline_Q[:, None] * ones_QD, found, where),
        same("truncated weights: a baseline changes no mean", "as often used", plain_QD.mean(0), found.mean(0), where),
    ]  # fmt: skip


def _mean_baseline(world: World, q: int, sampler_O: Tensor, rho_O: Tensor, G: int) -> Tensor:
    """Mean baseline E[sum w F / sum w] over G - 1 sampled outputs, w = rho^2 ||s||^2."""
    counts_BO, chance_B = exact.counts(sampler_O, G - 1)
    weight_O = rho_O.square() * world.norm2_QO[q]
    return chance_B @ ((counts_BO @ (weight_O * world.rewards_QO[q])) / (counts_BO @ weight_O))


def shift_leaves_the_hessian(world: World, shift: float) -> Claim:
    """Adding a constant to F leaves grad^2 J = E[F (grad^2 log pi + s s')] as it is, since E[grad^2 log pi] = -Phi."""
    outer = torch.einsum("qod,qoe->qode", world.score_QOD, world.score_QOD)
    formula = world.mean((world.rewards_QO + shift)[..., None, None] * (world.curvature_QODD + outer)).mean(0)
    return same("a constant in F leaves grad^2 J alone", "derived", world.hessian_DD, formula,
                f"{world.name}, shift {shift:g}")  # fmt: skip
