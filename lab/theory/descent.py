"""Theorems 3 to 6 by enumeration: what a step is promised, the best step, and every path of a few steps.

A landscape is anything with a J and gradient estimates that can be listed: a `SampledWorld`, whose estimates are those
of a policy, or a `Quadratic`, on which every inequality of the proofs is an equality, so that a wrong constant shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.func import grad, jvp

from lab.theory import exact
from lab.theory.claims import Claim
from lab.theory.worlds import World
from oblrpo import estimators

Number = TypeVar("Number", float, Tensor)


def promised(eta: Number, signal2: Number, trace: Number, N: int, c: float) -> Number:
    """Mean gain that theorem 3 promises of one step, eta ||grad J||^2 - (c/2) eta^2 (||grad J||^2 + tr H / N)."""
    return eta * signal2 - c / 2 * eta**2 * (signal2 + trace / N)


def factor(signal2: Number, trace: Number, N: int) -> Number:
    """The share of 1/c that theorem 4's best rate takes, N SNR / (1 + N SNR)."""
    return signal2 / (signal2 + trace / N)


def earned(signal2: Number, trace: Number, N: int, c: float) -> Number:
    """What theorem 3 promises of theorem 4's step, ||grad J||^2 f / (2c), where f is the factor."""
    return signal2 * factor(signal2, trace, N) / (2 * c)


def decay_bound(T: Tensor, gain: float, variance: float, N: int, c: float) -> Tensor:
    """Theorem 6's bound on the mean over T steps of E ||grad J||^2, with constants: (k + sqrt(k^2 + 4 k a)) / 2.

    k = 2 c gain / T and a = variance / N, gain >= E J_T - J_0 and variance >= tr H. By T5, sum_t E[x^2 / (x + a)] <=
    2 c gain with x = ||grad J||^2; x^2 / (x + a) is convex, so the mean m of x obeys m^2 / (m + a) <= k. No more than
    sqrt(2 c gain variance / (N T)) + 2 c gain / T.
    """
    k, a = 2 * c * gain / T, variance / N
    return (k + (k.square() + 4 * k * a).sqrt()) / 2


class Landscape(Protocol):
    """An objective and its gradient estimates at one place, as the theorems need them."""

    @property
    def theta_D(self) -> Tensor:
        """Parameters of this place."""

    @property
    def N(self) -> int:
        """Prompts a batch."""

    def at(self, theta_D: Tensor) -> Landscape:
        """The same landscape at other parameters."""

    @property
    def where(self) -> str:
        """Name of the landscape and its sizes, for a claim's note."""

    @property
    def signal2(self) -> float:
        """Squared norm of the gradient, || grad J ||^2."""

    @property
    def trace(self) -> float:
        """Trace of the covariance H of one prompt's gradient."""

    def outcomes(self) -> tuple[Tensor, Tensor]:
        """Chance and gradient of every batch of N, (chance_K, gradient_KD)."""

    def objectives(self, theta_KD: Tensor) -> Tensor:
        """Objective J at many places, (K,)."""


@dataclass(frozen=True)
class Quadratic:
    """The objective J = -(c/2) ||th||^2 with 2 D equally likely prompt gradients -c th +- sigma sqrt(D) e_d."""

    theta_D: Tensor
    c: float
    sigma: float
    N: int

    @property
    def where(self) -> str:
        """Name of the landscape and its sizes, for a claim's note."""
        return f"a quadratic of {len(self.theta_D)} parameters, N = {self.N}"

    def at(self, theta_D: Tensor) -> Quadratic:
        """The same landscape at other parameters."""
        return replace(self, theta_D=theta_D)

    @property
    def signal2(self) -> float:
        """Squared norm of the gradient, || grad J ||^2."""
        return float((self.c * self.theta_D).square().sum())

    @property
    def trace(self) -> float:
        """Trace of the covariance of a prompt's gradient, D sigma^2."""
        return len(self.theta_D) * self.sigma**2

    def outcomes(self) -> tuple[Tensor, Tensor]:
        """Chance and gradient of every batch of N, (chance_K, gradient_KD)."""
        D = len(self.theta_D)
        axes_DD = self.sigma * D**0.5 * torch.eye(D, dtype=torch.float64)
        prompt_KD = torch.cat([axes_DD, -axes_DD]) - self.c * self.theta_D
        chance_B, gradient_BND = exact.batches(torch.full((2 * D,), 0.5 / D, dtype=torch.float64), prompt_KD, self.N)
        return chance_B, gradient_BND.mean(1)

    def objectives(self, theta_KD: Tensor) -> Tensor:
        """Objective J at many places, (K,)."""
        return -self.c / 2 * theta_KD.square().sum(1)


@dataclass(frozen=True)
class SampledWorld:
    """A policy whose gradient is estimated from N prompts with G outputs each."""

    world: World
    N: int
    G: int
    baseline: exact.BaselineFunction
    name: str

    @property
    def theta_D(self) -> Tensor:
        """Parameters of this place."""
        return self.world.theta_D

    @property
    def where(self) -> str:
        """Name of the landscape and its sizes, for a claim's note."""
        return f"{self.world.name}, N = {self.N}, G = {self.G}, {self.name}"

    def at(self, theta_D: Tensor) -> SampledWorld:
        """The same landscape at other parameters."""
        return replace(self, world=self.world.at(theta_D))

    @property
    def signal2(self) -> float:
        """Squared norm of the gradient, || grad J ||^2."""
        return float(self.world.gradient_D.square().sum())

    @cached_property
    def trace(self) -> float:
        """Trace of the covariance of one prompt's gradient, by enumeration."""
        return exact.group_moments(self.world, self.baseline, self.G).trace

    def outcomes(self) -> tuple[Tensor, Tensor]:
        """Chance and gradient of every batch of N, (chance_K, gradient_KD)."""
        chance_B, gradient_BND = exact.batches(*exact.prompt_gradients(self.world, self.baseline, self.G), self.N)
        return chance_B, gradient_BND.mean(1)

    def objectives(self, theta_KD: Tensor) -> Tensor:
        """Objective J at many places, (K,)."""
        return self.world.objectives(theta_KD)


@dataclass(frozen=True)
class Path:
    """Sums over every path of some updates."""

    start: float
    """Objective J before the first update."""
    gain: float
    """Mean improvement, E J(th_T) - J(th_0)."""
    promised: float
    """Improvement that theorem 3 promises."""
    earned: float
    """Improvement that theorem 5 promises of the exact schedule, (1/2c) sum_t E[||grad J||^2 f_t]."""


def walk(landscape: Landscape, rates: list[float | None], c: float) -> Path:
    """Every run of T updates that the batches can make; a rate of None is that of theorem 4."""
    start = float(landscape.objectives(landscape.theta_D[None])[0])
    nodes, hoped, paid = [(1.0, landscape.theta_D)], 0.0, 0.0
    for rate in rates:
        following = []
        for chance, theta_D in nodes:
            here = landscape.at(theta_D)
            signal2, trace = here.signal2, here.trace
            eta = factor(signal2, trace, here.N) / c if rate is None else rate
            hoped += chance * promised(eta, signal2, trace, here.N, c)
            paid += chance * earned(signal2, trace, here.N, c)
            chance_K, gradient_KD = here.outcomes()
            following += list(zip((chance * chance_K).tolist(), theta_D + eta * gradient_KD, strict=True))
        nodes = following
    ends = landscape.objectives(torch.stack([theta_D for _, theta_D in nodes]))
    chances = torch.tensor([chance for chance, _ in nodes], dtype=torch.float64)
    return Path(start, float(chances @ ends) - start, hoped, paid)


def loss_bound(landscape: Landscape, rates: list[float | None], c: float, label: str) -> Claim:
    """Theorem 3: E L(th_T) <= L(th_0) - sum_t eta_t E||grad L||^2 + (c/2) sum_t eta_t^2 E(||grad L||^2 + tr H / N).

    On a quadratic of curvature c it is an equality, and is held to that.
    """
    path = walk(landscape, rates, c)
    tight = isinstance(landscape, Quadratic)
    what = "T3: the loss bound" + (", attained" if tight else "")
    note = f"{landscape.where}, {len(rates)} steps, {label}: E L(th_T) against the bound"
    return Claim(what, "paper", -path.start - path.promised, -path.start - path.gain, "=" if tight else "<=", note=note)


def total_decrease(landscape: Landscape, steps: int, c: float) -> Claim:
    """Theorem 5: (1/2c) sum_t E[||grad J||^2 f_t] <= E J_T - J_0 under the exact schedule; equal on a quadratic."""
    path = walk(landscape, [None] * steps, c)
    tight = isinstance(landscape, Quadratic)
    what = "T5: (1/2c) sum E[||grad J||^2 f] <= gain in J" + (", attained" if tight else "")
    return Claim(
        what, "paper", path.gain, path.earned, "=" if tight else "<=", note=f"{landscape.where}, {steps} steps"
    )


def decay_bound_is_attained(quadratic: Quadratic) -> Claim:
    """The constants of theorem 6 are attained: by one step from one place on a quadratic."""
    gain = walk(quadratic, [None], quadratic.c).gain
    bound = decay_bound(torch.ones(1, dtype=torch.float64), gain, quadratic.trace, quadratic.N, quadratic.c)
    return Claim("T6: the bound on mean E||grad J||^2, attained", "derived", float(bound), quadratic.signal2,
                 note=f"{quadratic.where}, T = 1")  # fmt: skip


def curvature_of_steps(landscape: SampledWorld, rate: float, places: int = 5) -> float:
    """The largest |d' grad^2 J d| / d'd along every step d that a batch can make: a value for c where no L is known."""
    _, gradient_KD = landscape.outcomes()
    gradient_KD = gradient_KD[gradient_KD.square().sum(1) > 0]

    def along(theta_D: Tensor, direction_D: Tensor) -> Tensor:
        turned_D: Tensor = jvp(grad(landscape.world.objective), (theta_D,), (direction_D,))[1]
        return (turned_D @ direction_D).abs() / (direction_D @ direction_D)

    shares = torch.linspace(0, 1, places, dtype=torch.float64)
    theta_ZD = (landscape.theta_D + rate * shares[:, None, None] * gradient_KD).flatten(0, 1)
    found: Tensor = torch.vmap(along, chunk_size=64)(theta_ZD, gradient_KD.repeat(places, 1))
    return float(found.max())


def best_rate(world: World, N: int, G: int, c: float) -> Claim:
    """Theorem 4: the rate that is promised most is (1/c) N SNR / (1 + N SNR); found where the derivative is 0."""
    signal2, trace = float(world.gradient_D.square().sum()), exact.rloo_moments(world, G).trace
    n_snr = N * signal2 / trace

    def rising(rate: float) -> bool:
        eta, *known = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (rate, signal2, trace))
        return float(torch.autograd.grad(promised(eta, known[0], known[1], N, c), eta)[0]) > 0

    note = f"{world.name}, N = {N}, G = {G}, N SNR = {n_snr:.3g}"
    found = bisect(rising, 0.0, 2 / c)
    return Claim("T4: the rate that minimises the bound", "paper", n_snr / (1 + n_snr) / c, found, note=note)


def schedule_uses_it(world: World, N: int, G: int) -> Claim:
    """Theorem 4: `SNRSchedule`, told the exact moments, sets the rate of the theorem."""
    signal2, trace = float(world.gradient_D.square().sum()), exact.rloo_moments(world, G).trace
    schedule = estimators.SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), ema=0.0)
    share = schedule.step(estimators.Moments(signal2, trace, N))
    n_snr = N * signal2 / trace
    return Claim("T4: SNRSchedule's factor", "paper", n_snr / (1 + n_snr), share, note=f"{world.name}, exact moments")


def noise_scale(world: World, N: int, G: int, c: float) -> Claim:
    """The best step of N prompts is promised Delta_max / (1 + B_noise / N), B_noise = 1 / SNR (McCandlish et al. 2018).

    Delta_max = ||grad J||^2 / (2c). Computed: the maximum of T3's promise over eta, by search.
    """
    signal2, trace = float(world.gradient_D.square().sum()), exact.rloo_moments(world, G).trace
    critical = estimators.Moments(signal2, trace, N).critical_batch_size
    low, high, golden = 0.0, 2 / c, (math.sqrt(5) - 1) / 2
    for _ in range(100):
        one, two = high - golden * (high - low), low + golden * (high - low)
        rises = promised(one, signal2, trace, N, c) < promised(two, signal2, trace, N, c)
        low, high = (one, high) if rises else (low, two)
    claimed = signal2 / (2 * c) / (1 + critical / N)
    return Claim("gradient noise scale: gain of the best step", "McCandlish et al. 2018", claimed,
                 promised(low, signal2, trace, N, c),
                 note=f"{world.name}, N = {N}, critical batch {critical:.3g} prompts")  # fmt: skip


def bisect(rising: Callable[[float], bool], low: float, high: float) -> float:
    """Where a function stops rising, between two numbers."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) else (low, middle)
    return low
