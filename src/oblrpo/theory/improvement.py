"""Predicted against realised improvement, step by step, and so how loose the loss bound is."""

from __future__ import annotations

from dataclasses import dataclass

from oblrpo.theory import exact
from oblrpo.theory.claims import Claim
from oblrpo.theory.smoothness import spectral_norm
from oblrpo.theory.worlds import World


@dataclass(frozen=True)
class Ascent:
    """One expected step from each place along the mean path under the exact schedule, N = 1 prompt of G outputs."""

    factor: list[float]
    predicted: list[float]
    """Eta ||grad J||^2 - (c/2) eta^2 (||grad J||^2 + tr H), c = osc(F) L."""
    local: list[float]
    """The same step by the second-order expansion with the true Hessian: what a perfect local bound would say."""
    realised: list[float]
    """E J(th + eta g) - J(th), over every group that could be sampled."""
    curvature: list[float]
    """||grad^2 J||."""


def ascend(world: World, steps: int, G: int) -> Ascent:
    """Follow the schedule; every expectation is a sum over all prompts and groups."""
    c = float(world.rewards_QO.max() - world.rewards_QO.min()) * world.smoothness
    rows, here = [], world
    for _ in range(steps):
        moments, signal2 = exact.group_moments(here, exact.named("rloo"), G), float(here.gradient_D.square().sum())
        factor = signal2 / (signal2 + moments.trace)
        eta = factor / c
        predicted = eta * signal2 - c / 2 * eta**2 * (signal2 + moments.trace)
        second = float((moments.total * here.hessian_DD).sum() + here.gradient_D @ here.hessian_DD @ here.gradient_D)
        now = float(here.objective(here.theta_D))
        realised = -now
        for chance, gradient_D in exact.every_gradient(here, exact.named("rloo"), G):
            realised += chance * float(here.objective(here.theta_D + eta * gradient_D))
        rows.append((factor, predicted, eta * signal2 + eta**2 / 2 * second, realised, spectral_norm(here.hessian_DD)))
        here = here.at(here.theta_D + eta * here.gradient_D)
    return Ascent(*(list(each) for each in zip(*rows, strict=True)))


def never_less_than_predicted(world: World, ascent: Ascent, G: int) -> Claim:
    """T3, step by step: what is realised is at least what is predicted."""
    gaps = [got - said for got, said in zip(ascent.realised, ascent.predicted, strict=True)]
    ratio = sum(ascent.realised) / sum(ascent.predicted)
    note = (
        f"{world.name}, {len(gaps)} steps, N = 1, G = {G}: least of realised - predicted; over all steps {ratio:.2g} "
        "times what the bound promises"
    )
    return Claim("T3: realised improvement against predicted", "paper", 0.0, min(gaps), ">=", note=note)
