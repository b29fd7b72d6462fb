"""The smoothness constant c of J: the paper's, the derived ones, and the true one, by its Hessian."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import hessian

from oblrpo.theory.claims import Claim
from oblrpo.theory.worlds import World


def spectral_norm(matrix_DD: Tensor) -> float:
    """Largest |eigenvalue| of a symmetric matrix."""
    return float(torch.linalg.eigvalsh(matrix_DD).abs().max())


def largest_curvature(world: World, places: int, seed: int = 0) -> float:
    """The largest ||grad^2 J|| found at random parameters and along gradient ascent from them: a lower bound on c."""
    generator = torch.Generator().manual_seed(seed)
    largest = 0.0
    for _ in range(places):
        here = world.at(world.theta_D + 2 * torch.randn(world.theta_D.shape, generator=generator, dtype=torch.float64))
        for _ in range(3):
            largest = max(largest, spectral_norm(here.hessian_DD))
            here = here.at(here.theta_D + here.gradient_D)
    return largest


def constants(world: World) -> dict[str, float]:
    """Bounds on c from |F| <= B, osc(F), ||grad^2 log pi|| <= L, ||grad log pi||^2 <= M: (label, source) -> value."""
    bound, width = float(world.rewards_QO.abs().max()), float(world.rewards_QO.max() - world.rewards_QO.min())
    return {
        "osc(F) L": width * world.smoothness,
        "B (L + M)": bound * (world.smoothness + world.score_bound),
        "B L + B^2 M": bound * world.smoothness + bound**2 * world.score_bound,
    }


SOURCES = {"osc(F) L": "derived", "B (L + M)": "derived", "B L + B^2 M": "paper"}


def bounds_hold(world: World, places: int = 30) -> list[Claim]:
    """Each bound against the largest curvature found."""
    found = largest_curvature(world, places)
    return [
        Claim(f"c <= {label}", SOURCES[label], bound, found, "<=", note=f"{world.name}, {places} starts")
        for label, bound in constants(world).items()
    ]


def sigmoid(rewards: float, logit: float) -> World:
    """One parameter, two outputs with log-odds theta, rewards +-B; theta stays below `logit`, where L and M are known.

    ||grad^2 log pi|| = p (1 - p) grows and ||grad log pi||^2 <= 1 below 0.
    """
    p = torch.tensor(logit, dtype=torch.float64).sigmoid()
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    return World(
        f"two outputs, log-odds <= {logit:g}, rewards +-{rewards:g}",
        lambda theta: torch.nn.functional.logsigmoid(theta * signs)[None],
        torch.tensor([logit], dtype=torch.float64),
        rewards * signs[None],
        float(p * (1 - p)),
        1.0,
    )


def small_rewards_break_the_papers_constant(rewards: float = 0.01, logit: float = -2.0) -> list[Claim]:
    """With B small, B^2 M vanishes beside B L, and c <= B L is false: scores count, however small the rewards are."""
    world = sigmoid(rewards, logit)
    found = spectral_norm(world.hessian_DD)
    return [
        Claim(f"c <= {label}, small rewards", SOURCES[label], bound, found, "<=", note=world.name)
        for label, bound in constants(world).items()
    ]


def kl_bound(world: World, reference_QO: Tensor, beta: float, places: int = 20, seed: int = 0) -> Claim:
    """With a KL penalty: grad^2 = E[F~ (grad^2 log pi + s s')] - beta Phi, so ||grad^2|| <= (osc(F~) + beta) L."""
    generator = torch.Generator().manual_seed(seed)
    claims = []
    for _ in range(places):
        here = world.at(world.theta_D + torch.randn(world.theta_D.shape, generator=generator, dtype=torch.float64))

        def penalised(theta_D: Tensor) -> Tensor:
            logp_QO = world.logp(theta_D)
            return (logp_QO.exp() * (world.rewards_QO - beta * (logp_QO - reference_QO.log()))).sum(1).mean()

        reward_QO = here.rewards_QO - beta * (here.logp_QO - reference_QO.log())
        width = float((reward_QO.max(1).values - reward_QO.min(1).values).max())
        found = spectral_norm(hessian(penalised)(here.theta_D))
        bound = (width + beta) * world.smoothness
        name, note = "KL in the bound: ||grad^2|| <= (osc(F~) + beta) L", f"{world.name}, beta = {beta}"
        claims.append(Claim(name, "derived", bound, found, "<=", note=note))
    return min(claims, key=lambda claim: claim.slack)
