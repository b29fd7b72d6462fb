"""The smoothness constant c of J: the paper's, the derived ones, and the true one, by its Hessian.

Assumptions 2 to 4 give L, M and B, at one place or for all parameters; every bound holds for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor
from torch.func import hessian

from lab.theory.claims import Claim, Measurement, slope, worst
from lab.theory.worlds import World

SOURCES = {"osc(F) L": "derived", "B (L + M)": "derived", "B L + B^2 M": "paper"}


def spectral_norm(matrix_DD: Tensor) -> Tensor:
    """Largest |eigenvalue| of symmetric matrices, (...)."""
    largest: Tensor = torch.linalg.eigvalsh(matrix_DD).abs().amax(-1)
    return largest


def constants(width: float, bound: float, smoothness: float, score_bound: float) -> dict[str, float]:
    """Bounds on ||grad^2 J|| from osc(F), |F| <= B, ||grad^2 log pi|| <= L, ||grad log pi||^2 <= M."""
    return {
        "osc(F) L": width * smoothness,
        "B (L + M)": bound * (smoothness + score_bound),
        "B L + B^2 M": bound * smoothness + bound**2 * score_bound,
    }


def everywhere(world: World) -> dict[str, float]:
    """Bounds on c, from the L and M that the world knows for all parameters."""
    return constants(world.width, float(world.rewards_QO.abs().max()), world.smoothness, world.score_bound)


def here(world: World) -> dict[str, float]:
    """Bounds on the curvature at one place, from the largest ||grad^2 log pi|| and squared score norm there."""
    bound = float(world.rewards_QO.abs().max())
    return constants(world.width, bound, float(spectral_norm(world.curvature_QODD).max()), float(world.norm2_QO.max()))


def places(world: World, number: int, spread: float = 2.0, seed: int = 0) -> Iterator[World]:
    """The world where it is, at places around, and after one and two steps of gradient ascent from each of those."""
    generator = torch.Generator().manual_seed(seed)
    yield world
    for _ in range(number):
        noise_D = torch.randn(world.theta_D.shape, generator=generator, dtype=torch.float64)
        place = world.at(world.theta_D + spread * noise_D)
        for _ in range(3):
            yield place
            place = place.at(place.theta_D + place.gradient_D)


def bounds_hold(world: World, number: int = 30) -> list[Claim]:
    """Check each bound with the L and M of all parameters against the largest curvature found."""
    found = max(float(spectral_norm(place.hessian_DD)) for place in places(world, number))
    return [
        Claim(f"c <= {label}", SOURCES[label], bound, found, "<=", note=f"{world.name}, {number} starts")
        for label, bound in everywhere(world).items()
    ]


def bounds_hold_at_every_place(world: World, number: int) -> list[Claim]:
    """Check each bound with the L and M of a place against the curvature there, which needs no L for all parameters."""
    claims = []
    for place in places(world, number, 0.5):
        found = float(spectral_norm(place.hessian_DD))
        claims.append([
            Claim(f"||grad^2 J|| <= {label} at every place", SOURCES[label], bound, found, "<=", note=world.name)
            for label, bound in here(place).items()
        ])  # fmt: skip
    return [worst(list(column)).noted(world.name) for column in zip(*claims, strict=True)]


def rare(chance: float = 1e-3, rewards: tuple[float, float] = (0.0, 1.0)) -> World:
    """One parameter, outputs -1, 0, 1 with log-probabilities theta o + const, +-1 rare; they pay `rewards[1]`, 0 `[0]`.

    At theta = 0 s = o and J'' = Cov(F, s^2) = +-osc(F) chance (1 - chance), where L = Var s = chance: osc(F) L is
    attained but for `chance` itself.
    """
    outputs = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    base = torch.tensor([chance / 2, 1 - chance, chance / 2], dtype=torch.float64).log()
    payment = torch.tensor([[rewards[1], rewards[0], rewards[1]]], dtype=torch.float64)
    return World(f"two rare outputs of three, {chance:g}", lambda theta: (theta * outputs + base).log_softmax(0)[None],
                 torch.zeros(1, dtype=torch.float64), payment)  # fmt: skip


def nearly_attained() -> Claim:
    """The bound osc(F) L cannot be made smaller: it is attained by rare outputs with all of the score."""
    world = rare()
    found, bound = float(spectral_norm(world.hessian_DD)), here(world)["osc(F) L"]
    note = f"{world.name}: {found / bound:.4f} of the bound"
    return Claim("||grad^2 J|| <= osc(F) L, nearly attained", "derived", bound, found, "<=", note=note)


def pair(rewards: float, logit: float = 1.25) -> World:
    """Two tokens that share one parameter, logits theta +- `logit`; a pair of equal tokens pays, of unequal ones costs.

    log pi'' = -v, v = sum p (1 - p) over both tokens, for every output; |logit| < log(2 + sqrt 3) makes v greatest at
    theta = 0, so that L = 2 p (1 - p) there. A score is the number of ones less its mean, within (-2, 2): M = 4.
    """
    logits = torch.tensor([logit, -logit], dtype=torch.float64)
    token_OT = torch.tensor(list(product([0.0, 1.0], repeat=2)), dtype=torch.float64)
    sign_O = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)

    def logp(theta: Tensor) -> Tensor:
        signed_OT = (2 * token_OT - 1) * (theta + logits)
        return torch.nn.functional.logsigmoid(signed_OT).sum(1)[None]

    p = 1 / (1 + math.exp(-logit))
    world = World(f"two tokens of one parameter, rewards +-{rewards:g}", logp, torch.zeros(1, dtype=torch.float64),
                  rewards * sign_O[None])  # fmt: skip
    return replace(world, smoothness=2 * p * (1 - p), score_bound=4.0)


def small_rewards_break_the_papers_constant(rewards: float = 1e-3) -> list[Claim]:
    """With B small, B^2 M vanishes beside B L, and c <= B L is false: |J''(0)| = B E|s^2 - v| is greater."""
    world = pair(rewards)
    found = float(spectral_norm(world.hessian_DD))
    return [
        Claim(f"c <= {label}, small rewards", SOURCES[label], bound, found, "<=", note=f"{world.name}: at theta = 0")
        for label, bound in everywhere(world).items()
    ]


def kl_bound(world: World, reference_QO: Tensor, beta: float, number: int = 0) -> Claim:
    """With a KL penalty: grad^2 = E[F~ (grad^2 log pi + s s')] - beta Phi, so ||grad^2|| <= (osc(F~) + beta) L.

    F~ = F - beta log(pi / ref), L that of the place.
    """
    claims = []
    for place in places(world, number, 0.5):
        found = float(
            spectral_norm(hessian(lambda theta_D: penalised(world, reference_QO, beta, theta_D))(place.theta_D))
        )
        paid = place.paid(place.rewards_QO - beta * (place.logp_QO - reference_QO.log()))
        bound = (paid.width + beta) * float(spectral_norm(place.curvature_QODD).max())
        name, note = "KL in the bound: ||grad^2|| <= (osc(F~) + beta) L", f"{world.name}, beta = {beta:g}"
        claims.append(Claim(name, "derived", bound, found, "<=", note=note))
    return worst(claims).noted(claims[0].note)


def penalised(world: World, reference_QO: Tensor, beta: float, theta_D: Tensor) -> Tensor:
    """The penalised objective, J - beta KL(pi || ref)."""
    logp_QO = world.logp(theta_D)
    return (logp_QO.exp() * (world.rewards_QO - beta * (logp_QO - reference_QO.log()))).sum(1).mean()


def kl_bound_is_nearly_attained(beta: float) -> Claim:
    """The bound with a KL penalty is attained where the reference is the policy itself and rare outputs cost."""
    world = rare(rewards=(1.0, 0.0))
    found = float(spectral_norm(hessian(lambda theta_D: penalised(world, world.pi_QO, beta, theta_D))(world.theta_D)))
    bound = (world.width + beta) * float(spectral_norm(world.curvature_QODD).max())
    note = f"{world.name}, beta = {beta:g}: {found / bound:.4f} of the bound"
    return Claim("KL in the bound: nearly attained", "derived", bound, found, "<=", note=note)


def assumptions(world: World, number: int = 30) -> list[Claim]:
    """Assumptions 2 and 3: the L and M that a world knows for all parameters are not exceeded anywhere tried."""
    tried = list(places(world, number))
    found = (
        ("A2: ||grad^2 log pi|| <= L", world.smoothness, lambda w: float(spectral_norm(w.curvature_QODD).max())),
        ("A3: ||grad log pi||^2 <= M", world.score_bound, lambda w: float(w.norm2_QO.max())),
    )
    return [
        Claim(result, "paper", bound, max(map(of, tried)), "<=", note=f"{world.name}, {number} starts")
        for result, bound, of in found
    ]


def assumptions_of_a_network(
    world: World, scales: tuple[float, ...] = (1.0, 2.0, 4.0)
) -> tuple[list[Claim], list[Measurement]]:
    """Assumptions 2 and 3 ask for one L and one M for all parameters; those of a network grow with the parameters.

    Claimed: no growth, exponent 0. Computed: the slope of log L(k theta) and of log M(k theta) against log k.
    """
    tried = [world.at(scale * world.theta_D) for scale in scales]
    of: tuple[tuple[str, str, Callable[[World], float]], ...] = (
        ("A2: one L for all parameters of a network", "L", lambda w: float(spectral_norm(w.curvature_QODD).max())),
        ("A3: one M for all parameters of a network", "M", lambda w: float(w.norm2_QO.max())),
    )
    log_k, claims, found = torch.tensor(scales, dtype=torch.float64).log(), [], []
    for result, letter, value_of in of:
        values = [value_of(place) for place in tried]
        found += [Measurement(f"{letter} at {k:g} theta", world.name, v) for k, v in zip(scales, values, strict=True)]
        growth = slope(log_k, torch.tensor(values, dtype=torch.float64).log())
        note = f"{world.name}: exponent of {letter}(k theta) in k, k to {scales[-1]:g}"
        claims.append(Claim(result, "paper", 0.0, growth, "<=", note=note))
    return claims, found
