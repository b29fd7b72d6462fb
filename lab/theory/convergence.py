"""Theorems 5 and 6 on sampled runs: how fast the squared gradient falls under the exact schedule and fixed rates.

Prompts with two outputs each and one shared parameter: everything is a closed form of theta, so that hundreds of runs
of tens of thousands of steps take seconds. R runs, Q prompts, W ways to set the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lab.theory.claims import Claim, Measurement, Z, interval, slope
from lab.theory.descent import decay_bound, earned, factor
from lab.theory.worlds import World

RUNS, STEPS, N = 128, 20_000, 4


@dataclass(frozen=True)
class Slide:
    """A task with J(theta) = mean_q r_q sigmoid(a_q theta + b_q): output 1 of prompt q pays r_q, output 0 nothing."""

    name: str
    a_Q: Tensor
    b_Q: Tensor
    r_Q: Tensor
    start: float

    @property
    def smoothness(self) -> float:
        """Bound on |J''| by |sigmoid''| <= 1 / (6 sqrt 3): c = mean_q |r_q| a_q^2 / (6 sqrt 3).

        Osc(F) L, prompt by prompt, is 3 sqrt(3) / 2 times that: there L = a_q^2 / 4.
        """
        return float((self.r_Q.abs() * self.a_Q.square()).mean()) / (6 * math.sqrt(3))

    @property
    def variance(self) -> float:
        """A bound on tr H <= E[F^2 w] = mean_q (r_q a_q)^2 p (1-p)^2, and p (1-p)^2 <= 4/27."""
        return float((self.r_Q * self.a_Q).square().mean()) * 4 / 27

    @cached_property
    def supremum(self) -> float:
        """Upper bound on J: its maximum on a grid, plus what it can rise by in between (|J'| <= mean |r a| / 4)."""
        theta_R = torch.linspace(-100, 100, 40_001, dtype=torch.float64)
        between = float((self.r_Q * self.a_Q).abs().mean()) / 4 * 200 / 40_000 / 2
        return float(self.objective(theta_R).max()) + between

    def objective(self, theta_R: Tensor) -> Tensor:
        """The objective J at every theta, (R,)."""
        return (self.r_Q * (theta_R[..., None] * self.a_Q + self.b_Q).sigmoid()).mean(-1)

    def moments(self, theta_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of J, tr H of one output without a baseline, and the chance of output 1, (R, Q)."""
        p_RQ = (theta_R[..., None] * self.a_Q + self.b_Q).sigmoid()
        estimate_RQ = self.r_Q * self.a_Q * (1 - p_RQ)
        gradient_R = (p_RQ * estimate_RQ).mean(-1)
        return gradient_R, (p_RQ * estimate_RQ.square()).mean(-1) - gradient_R.square(), p_RQ

    def at(self, theta: float) -> World:
        """The task at this theta as a policy to enumerate."""
        rewards_QO = torch.stack([torch.zeros_like(self.r_Q), self.r_Q], 1)
        signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)

        def logp(theta_D: Tensor) -> Tensor:
            return torch.nn.functional.logsigmoid(signs * (theta_D * self.a_Q + self.b_Q)[:, None])

        return World(self.name, logp, torch.tensor([theta], dtype=torch.float64), rewards_QO)


def climb() -> Slide:
    """A task that can be solved: the optimum is at infinity, where the noise vanishes with the gradient."""
    one = torch.ones(1, dtype=torch.float64)
    return Slide("solvable", one, 0 * one, one, -2.0)


def flat() -> Slide:
    """Prompts that pull against each other; rewards are such that J has a maximum at 0 with no curvature there.

    The gradient falls with the third power of the distance, and the noise stays. Further off lies a higher plateau.
    """
    a_Q = torch.tensor([1.0, -1.5, 2.0, -2.5], dtype=torch.float64)
    b_Q = torch.tensor([0.5, -1.0, 1.5, 0.7], dtype=torch.float64)
    p = b_Q.sigmoid()
    first = p * (1 - p)
    derivatives = (
        first,
        first * (1 - 2 * p),
        first * (1 - 6 * p + 6 * p**2),
        first * (1 - 2 * p) * (1 - 12 * p + 12 * p**2),
    )
    rows = torch.stack([a_Q**k * each for k, each in enumerate(derivatives, 1)])
    r_Q = torch.linalg.solve(rows, torch.tensor([0.0, 0.0, 0.0, -1.0], dtype=torch.float64))
    return Slide("flat maximum", a_Q, b_Q, r_Q / r_Q.abs().max(), 0.8)


@dataclass(frozen=True)
class Curve:
    """What runs under one rate did, looked at after K numbers of steps T."""

    times_K: Tensor
    norm2_RK: Tensor
    """Means of ||grad J||^2 over the steps t < T."""
    norm_RK: Tensor
    """Means of ||grad J|| over the steps t < T."""
    now_RK: Tensor
    """The norm ||grad J|| at step T itself."""
    objective_R: Tensor
    """J at the end of each run."""
    earned_R: Tensor
    """The sum (1/2c) sum_t ||grad J||^2 f_t over all steps, where f is the factor of the exact schedule."""


def times(steps: int) -> list[int]:
    """Numbers of steps to look at: eight a decade from 10 on, and the last."""
    return sorted({*(round(10 ** (k / 8)) for k in range(8, 1 + int(8 * math.log10(steps)))), steps})


def run(
    slide: Slide, rates: list[float | None], runs: int = RUNS, steps: int = STEPS, n: int = N, seed: int = 0
) -> list[Curve]:
    """Run SGD on sampled gradients of n prompts at each rate; None is the rate of theorem 4."""
    generator = torch.Generator().manual_seed(seed)
    theta_WR = torch.full((len(rates), runs), slide.start, dtype=torch.float64)
    fixed_W1 = torch.tensor([math.nan if rate is None else rate for rate in rates], dtype=torch.float64)[:, None]
    exact_W1, c = fixed_W1.isnan(), slide.smoothness
    norm2, norm, paid = (torch.zeros_like(theta_WR) for _ in range(3))
    found, last = [], set(times(steps))
    for t in range(1, steps + 1):
        gradient_WR, trace_WR, p_WRQ = slide.moments(theta_WR)
        signal2_WR = gradient_WR.square()
        norm2, norm = norm2 + signal2_WR, norm + gradient_WR.abs()
        paid = paid + earned(signal2_WR, trace_WR, n, c)
        if t in last:
            found.append((norm2 / t, norm / t, gradient_WR.abs()))
        eta_WR = torch.where(exact_W1, factor(signal2_WR, trace_WR, n) / c, fixed_W1)
        prompt_WRN = torch.randint(len(slide.a_Q), (len(rates), runs, n), generator=generator)
        p_WRN = p_WRQ.gather(2, prompt_WRN)
        hit_WRN = torch.rand(p_WRN.shape, generator=generator, dtype=torch.float64) < p_WRN
        estimate_WRN = hit_WRN * slide.r_Q[prompt_WRN] * slide.a_Q[prompt_WRN] * (1 - p_WRN)
        theta_WR = theta_WR + eta_WR * estimate_WRN.mean(2)
    means_WRK = [torch.stack(each, 2) for each in zip(*found, strict=True)]
    ends_WR = slide.objective(theta_WR)
    at_K = torch.tensor(times(steps))
    norm2_WRK, norm_WRK, now_WRK = means_WRK
    return [Curve(at_K, norm2_WRK[w], norm_WRK[w], now_WRK[w], ends_WR[w], paid[w]) for w in range(len(rates))]


def total_decrease(slide: Slide, curve: Curve) -> Claim:
    """Theorem 5 on sampled runs: (1/2c) sum_t E[||grad J||^2 f_t] <= E J_T - J_0."""
    gain_R = curve.objective_R - float(slide.objective(torch.tensor([slide.start], dtype=torch.float64)))
    _, margin = interval(curve.earned_R - gain_R)
    note = f"{slide.name}, {len(gain_R)} runs of {int(curve.times_K[-1])} steps, N = {N}"
    return Claim("T5: (1/2c) sum E[||grad J||^2 f] <= gain in J", "paper", float(gain_R.mean()),
                 float(curve.earned_R.mean()), "<=", margin=margin, note=note)  # fmt: skip


def bounded_decay(slide: Slide, curve: Curve, n: int = N) -> Claim:
    """Theorem 6 with its constants at every T; what is computed is the largest share of the bound that is used."""
    gain = slide.supremum - float(slide.objective(torch.tensor([slide.start], dtype=torch.float64)))
    bound_K = decay_bound(curve.times_K.double(), gain, slide.variance, n, slide.smoothness)
    share_K = curve.norm2_RK.mean(0) / bound_K
    worst = int(share_K.argmax())
    margin = interval(curve.norm2_RK[:, worst] / bound_K[worst])[1]
    note = (
        f"{slide.name}, N = {n}: the largest share is at T = {int(curve.times_K[worst])}, {float(share_K[-1]):.3g} at "
        f"T = {int(curve.times_K[-1])}"
    )
    return Claim("T6: mean E||grad J||^2 over its bound O(T^-1/2), every T", "paper", 1.0, float(share_K[worst]), "<=",
                 margin=margin, note=note)  # fmt: skip


def decay(curve: Curve, values_RK: Tensor, decade: int = 0, seed: int = 0) -> tuple[float, float]:
    """Slope of the log mean value against log T over a decade (0: the last), and `Z` bootstrap standard errors."""
    top = curve.times_K[-1] / 10**decade
    kept = (curve.times_K >= top / 10) & (curve.times_K <= top)
    log_T = curve.times_K[kept].double().log()
    index = torch.randint(len(values_RK), (300, len(values_RK)), generator=torch.Generator().manual_seed(seed))
    samples = torch.tensor([slope(log_T, values_RK[i][:, kept].mean(0).log()) for i in index])
    return slope(log_T, values_RK[:, kept].mean(0).log()), Z * float(samples.std())


def measurements(slide: Slide, by_rate: dict[str, Curve]) -> list[Measurement]:
    """Slopes, which are of these runs and this length (theorem 6 bounds no slope), and where each rate arrives."""
    found = []
    for name, curve in by_rate.items():
        where = f"{slide.name}, {name}"
        for what, values_RK in (("||grad J||^2", curve.norm2_RK), ("||grad J||", curve.norm_RK)):
            last, margin = decay(curve, values_RK)
            before, margin_before = decay(curve, values_RK, 1)
            steady = abs(last - before) <= max(margin + margin_before, 0.02)
            note = f"{before:.3f} ± {margin_before:.2g} a decade before" + ("" if steady else ": a transient")
            found.append(Measurement(f"slope of mean {what} over the last decade of T", where, last, margin, note))
        found.append(Measurement("mean ||grad J||^2 over all T", where, *interval(curve.norm2_RK[:, -1])))
        found.append(Measurement("J in the end", where, *interval(curve.objective_R)))
    return found
