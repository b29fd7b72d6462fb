"""A KL penalty towards a reference: as reward, as loss, and what it does to the best baseline. Derived (no paper)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev

from lab.theory import exact
from lab.theory.claims import Claim, same
from lab.theory.smoothness import penalised
from lab.theory.theorems import vertex
from lab.theory.worlds import World

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
}
"""Schulman's estimators of KL(pi || ref) as functions of a sampled output's log(pi / ref), to be differentiated."""


def sampled_gradient(world: World, reference_QO: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean gradient of `loss` over sampled outputs; the loss is differentiated, the sampling is not."""

    def over_samples(theta_D: Tensor) -> Tensor:
        return (world.pi_QO * loss(world.logp(theta_D) - reference_QO.log())).sum(1).mean()

    gradient_D: Tensor = jacrev(over_samples)(world.theta_D).detach()
    return gradient_D


def divergences(world: World, reference_QO: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of KL(pi || ref) and KL(ref || pi), by differentiating the sums over all outputs."""

    def reverse(theta_D: Tensor) -> Tensor:
        return -penalised(world.paid(torch.zeros_like(world.rewards_QO)), reference_QO, 1.0, theta_D)

    def forward(theta_D: Tensor) -> Tensor:
        return (reference_QO * (reference_QO.log() - world.logp(theta_D))).sum(1).mean()

    return jacrev(reverse)(world.theta_D).detach(), jacrev(forward)(world.theta_D).detach()


def forms(world: World, reference_QO: Tensor, beta: float) -> list[Claim]:
    """Which objective each form of the penalty descends; k3 as a loss is not that of the others."""
    reverse_D, forward_D = divergences(world, reference_QO)
    penalised_D = jacrev(lambda theta_D: penalised(world, reference_QO, beta, theta_D))(world.theta_D).detach()
    paid = world.paid(world.rewards_QO - beta * (world.logp_QO - reference_QO.log()))
    in_reward_D = exact.group_moments(paid, exact.named("rloo"), 2).mean_QD.mean(0)
    loss_D = {name: sampled_gradient(world, reference_QO, loss) for name, loss in LOSSES.items()}
    return [
        same("k1 in the reward: grad (J - beta KL(pi||ref))", "derived", penalised_D, in_reward_D,
             f"{world.name}, RLOO, G = 2"),
        same("k2 as a loss: grad KL(pi||ref)", "derived", reverse_D, loss_D["k2"], world.name),
        same("k3 as a loss: grad KL(ref||pi)", "derived", forward_D, loss_D["k3"], world.name),
        same("k3 as a loss: grad KL(pi||ref)", "as often used", reverse_D, loss_D["k3"], world.name),
        same("k1 as a loss: grad KL(pi||ref)", "as often used", reverse_D, loss_D["k1"], world.name),
    ]  # fmt: skip


def best_baseline(world: World, beta: float, differentiated: bool) -> Claim:
    """With F~ = F - beta log(pi/ref) the best b is E[w F~] / E[w], less beta if the log-ratio is differentiated too.

    The estimate of one output is the gradient, by automatic differentiation, of (F~ - b) log pi with F~ held fixed, and
    of F~ itself where that is differentiated; the best b is the vertex of its variance.
    """
    reference_QO = torch.full_like(world.pi_QO, 1 / world.pi_QO.shape[1])
    reward_QO = world.rewards_QO - beta * (world.logp_QO - reference_QO.log())
    claimed_Q = exact.optimal_baseline(world.paid(reward_QO)) - (beta if differentiated else 0.0)

    def variance(q: int, baseline: float) -> float:
        def objective(theta_D: Tensor) -> Tensor:
            logp_O = world.logp(theta_D)[q]
            through_O = -beta * (logp_O - reference_QO[q].log()) if differentiated else 0.0
            return (reward_QO[q] - baseline) * logp_O + through_O

        estimate_OD = jacrev(objective)(world.theta_D).detach()
        mean_D = world.pi_QO[q] @ estimate_OD
        return float(world.pi_QO[q] @ estimate_OD.square().sum(1) - mean_D @ mean_D)

    found = [vertex(lambda b, q=q: variance(q, b)) for q in range(len(claimed_Q))]  # type: ignore[misc]
    how = "b* - beta, log-ratio differentiated" if differentiated else "E[w F~] / E[w]"
    return same(f"KL in the reward: best baseline {how}", "derived", claimed_Q,
                torch.tensor(found, dtype=torch.float64), f"{world.name}, beta = {beta:g}")  # fmt: skip
