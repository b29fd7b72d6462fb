"""Predicted against realised improvement, step by step, and so how loose the loss bound is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.theory import exact
from lab.theory.claims import Claim
from lab.theory.descent import factor, promised
from lab.theory.worlds import World


@dataclass(frozen=True)
class Ascent:
    """One expected step from each place along the mean path under the exact schedule, N = 1 prompt of G outputs."""

    predicted: list[float]
    """Theorem 3's promise for each step, eta ||grad J||^2 - (c/2) eta^2 (||grad J||^2 + tr H) with c = osc(F) L."""
    local: list[float]
    """Mean improvement by a second-order expansion with the true Hessian: what a perfect local bound would say."""
    realised: list[float]
    """Mean improvement E J(th + eta g) - J(th), over every group that could be sampled."""


def ascend(world: World, steps: int, G: int) -> Ascent:
    """Follow the exact schedule; every expectation is a sum over all prompts and groups."""
    c = world.width * world.smoothness
    rows, here = [], world
    for _ in range(steps):
        moments, signal2 = exact.group_moments(here, exact.named("rloo"), G), float(here.gradient_D.square().sum())
        eta = factor(signal2, moments.trace, 1) / c
        predicted = promised(eta, signal2, moments.trace, 1, c)
        chance_K, gradient_KD = exact.prompt_gradients(here, exact.named("rloo"), G)
        reached = float(chance_K @ here.objectives(here.theta_D + eta * gradient_KD))
        realised = reached - float(here.objective(here.theta_D))
        rows.append((predicted, eta * signal2 + eta**2 / 2 * second_order(here, moments), realised))
        here = here.at(here.theta_D + eta * here.gradient_D)
    return Ascent(*(list(each) for each in zip(*rows, strict=True)))


def second_order(world: World, moments: exact.ExactMoments) -> float:
    """Mean of g' grad^2 J g over one prompt's gradient g, tr(H grad^2 J) + grad J' grad^2 J grad J."""
    hessian_DD, gradient_D = world.hessian_DD, world.gradient_D
    return float((moments.total * hessian_DD).sum() + gradient_D @ hessian_DD @ gradient_D)


def second_order_is_the_derivative(world: World, G: int, name: str) -> Claim:
    """The second derivative of E J(th + eta g) at eta = 0 is E[g' grad^2 J g], by autograd through every step."""
    chance_K, gradient_KD = exact.prompt_gradients(world, exact.named(name), G)
    eta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    expected: Tensor = chance_K @ world.objectives(world.theta_D + eta * gradient_KD)
    first = torch.autograd.grad(expected, eta, create_graph=True)[0]
    second = float(torch.autograd.grad(first, eta)[0])
    claimed = second_order(world, exact.group_moments(world, exact.named(name), G))
    return Claim("second order of a step: tr(H grad^2 J) + grad J' grad^2 J grad J", "derived", claimed, second,
                 note=f"{world.name}, G = {G}, {name}")  # fmt: skip


def never_less_than_predicted(world: World, ascent: Ascent, G: int) -> Claim:
    """Theorem 3, step by step: what is realised is at least what is predicted."""
    gaps = [got - said for got, said in zip(ascent.realised, ascent.predicted, strict=True)]
    promise = sum(ascent.predicted)
    note = f"{world.name}, {len(gaps)} steps, N = 1, G = {G}: least of realised - predicted"
    if promise > 0:
        note += f"; over all steps {sum(ascent.realised) / promise:.2g} times what the bound promises"
    return Claim("T3: realised improvement against predicted", "paper", 0.0, min(gaps), ">=", note=note)
