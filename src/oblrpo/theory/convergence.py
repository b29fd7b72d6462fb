"""Theorems 5 and 6, run: how fast the squared gradient falls under the exact schedule, and under fixed rates.

Prompts with two outputs each and one shared parameter: everything is a closed form of theta, so that hundreds of runs
of tens of thousands of steps take seconds. R runs, Q prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.theory.claims import Claim

RUNS, STEPS, N = 128, 20_000, 4


@dataclass(frozen=True)
class Slide:
    """J(theta) = mean_q r_q sigmoid(a_q theta + b_q); output 1 of prompt q pays r_q, output 0 nothing."""

    name: str
    a_Q: Tensor
    b_Q: Tensor
    r_Q: Tensor
    start: float

    @property
    def smoothness(self) -> float:
        """C = osc(F) L, prompt by prompt: |sigmoid''| <= 1 / (6 sqrt 3)."""
        return float((self.r_Q.abs() * self.a_Q.square()).mean()) / (6 * math.sqrt(3))

    def objective(self, theta_R: Tensor) -> Tensor:
        """J, (R,)."""
        return (self.r_Q * (theta_R[:, None] * self.a_Q + self.b_Q).sigmoid()).mean(1)

    def moments(self, theta_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Grad J, tr H of one prompt with one output and no baseline, and P(output 1), (R, Q)."""
        p_RQ = (theta_R[:, None] * self.a_Q + self.b_Q).sigmoid()
        gradient_R = (self.r_Q * self.a_Q * p_RQ * (1 - p_RQ)).mean(1)
        second_R = (p_RQ * (self.r_Q * self.a_Q * (1 - p_RQ)).square()).mean(1)
        return gradient_R, second_R - gradient_R.square(), p_RQ


def climb() -> Slide:
    """A task that can be solved: the optimum is at infinity, where the noise vanishes with the gradient."""
    one = torch.ones(1, dtype=torch.float64)
    return Slide("solvable", one, 0 * one, one, -2.0)


def flat() -> Slide:
    """Prompts that pull against each other; rewards are such that J has a maximum at 0 with no curvature there.

    The gradient falls with the third power of the distance, and the noise stays.
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
    """Means over t < T, by T, (R, K) each, and J in the end."""

    times_K: Tensor
    norm2_RK: Tensor
    norm_RK: Tensor
    objective_R: Tensor


def run(slide: Slide, rate: float | None, runs: int = RUNS, steps: int = STEPS, seed: int = 0) -> Curve:
    """SGD on sampled gradients of N prompts, at theorem 4's rate (None) or a fixed one."""
    generator = torch.Generator().manual_seed(seed)
    theta_R = torch.full((runs,), slide.start, dtype=torch.float64)
    times = sorted({round(10 ** (k / 8)) for k in range(8, 1 + round(8 * math.log10(steps)))})
    sums, norm2, norm = [], torch.zeros(runs, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
    Q = len(slide.a_Q)
    for t in range(1, times[-1] + 1):
        gradient_R, trace_R, p_RQ = slide.moments(theta_R)
        signal2_R = gradient_R.square()
        norm2, norm = norm2 + signal2_R, norm + gradient_R.abs()
        if t in times:
            sums.append((norm2 / t, norm / t))
        eta = signal2_R / (signal2_R + trace_R / N) / slide.smoothness if rate is None else rate
        prompt_RN = torch.randint(Q, (runs, N), generator=generator)
        p_RN = p_RQ.gather(1, prompt_RN)
        hit_RN = torch.rand(runs, N, generator=generator, dtype=torch.float64) < p_RN
        estimate_R = (hit_RN * slide.r_Q[prompt_RN] * slide.a_Q[prompt_RN] * (1 - p_RN)).mean(1)
        theta_R = theta_R + eta * estimate_R
    norm2_RK, norm_RK = (torch.stack(each, 1) for each in zip(*sums, strict=True))
    return Curve(torch.tensor(times), norm2_RK, norm_RK, slide.objective(theta_R))


def slope(curve: Curve, values_RK: Tensor, seed: int = 0) -> tuple[float, float]:
    """Slope of log mean value against log T over the last decade, and half of its 95 % bootstrap interval over runs."""
    late = curve.times_K >= curve.times_K[-1] / 10
    log_T = curve.times_K[late].double().log()
    x = log_T - log_T.mean()
    index = torch.randint(len(values_RK), (500, len(values_RK)), generator=torch.Generator().manual_seed(seed))
    fit = lambda values_K: float((x @ values_K[late].log()) / (x @ x))  # noqa: E731
    samples = torch.tensor([fit(values_RK[i].mean(0)) for i in index])
    return fit(values_RK.mean(0)), 1.96 * float(samples.std())


def total_decrease(slide: Slide, runs: int = 64, steps: int = 2000) -> Claim:
    """What T5 rests on: (1/2c) sum_t E[||grad J||^2 f_t] <= J* - J_0, f = N SNR / (1 + N SNR)."""
    generator = torch.Generator().manual_seed(1)
    theta_R, spent_R = torch.full((runs,), slide.start, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
    first = float(slide.objective(theta_R).mean())
    for _ in range(steps):
        gradient_R, trace_R, p_RQ = slide.moments(theta_R)
        factor_R = gradient_R.square() / (gradient_R.square() + trace_R / N)
        spent_R += gradient_R.square() * factor_R / (2 * slide.smoothness)
        prompt_RN = torch.randint(len(slide.a_Q), (runs, N), generator=generator)
        p_RN = p_RQ.gather(1, prompt_RN)
        hit_RN = torch.rand(runs, N, generator=generator, dtype=torch.float64) < p_RN
        estimate_R = (hit_RN * slide.r_Q[prompt_RN] * slide.a_Q[prompt_RN] * (1 - p_RN)).mean(1)
        theta_R = theta_R + factor_R / slide.smoothness * estimate_R
    gained = float(slide.objective(theta_R).mean()) - first
    note = f"{slide.name}, {runs} runs of {steps} steps, N = {N}"
    return Claim(
        "T5: (1/2c) sum E[||grad J||^2 f] <= gain in J", "paper", gained, float(spent_R.mean()), "<=", note=note
    )


def decay(slide: Slide, curve: Curve) -> list[Claim]:
    """T5/T6: the mean of E||grad J||^2 falls at least as T^-1/2; the mean norm need not."""
    claims = []
    for what, values_RK, source in (
        ("mean squared gradient norm", curve.norm2_RK, "paper"),
        ("mean gradient norm", curve.norm_RK, "paper, as summarised"),
    ):
        found, margin = slope(curve, values_RK)
        note = f"{slide.name}: slope {found:.3f} +- {margin:.3f} over the last decade of {int(curve.times_K[-1])} steps"
        claims.append(Claim(f"T6: the {what} falls as T^-1/2 or faster", source, -0.5, found, "<=", note=note))
    return claims
