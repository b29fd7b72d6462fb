"""Why theorem 6 is about the squared norm: under the exact schedule the mean norm can fall slower than T^-1/2.

Four prompts of one output that pays and one that does not, logits theta +- b_1 and theta +- b_2, rewards such that J
has its only maximum at 0 and J' = -k theta^3 + ... there, with noise that stays. V = |J'|^(-8/3) grows by no more than
a constant K a step on average, wherever the step begins; so E V_t <= V_0 + K t, and as x^(-3/8) is convex,
E |J'(theta_t)| >= (E V_t)^(-3/8) >= (V_0 + K t)^(-3/8). No multiple of T^-1/2 bounds the mean of that over T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.theory.claims import Claim, interval, slope
from lab.theory.convergence import Curve, Slide
from lab.theory.descent import factor

B1, B2 = 1.0, 2.0
A1, A2 = 1 + math.cosh(B1), 1 + math.cosh(B2)
POWER = 8 / 3


def quartic(start: float = 2.0) -> Slide:
    """The task: sigmoid'(x + b) - sigmoid'(x - b) = -sinh(x) sinh(b) / (cosh x + cosh b)^2, twice, of opposite sign."""
    near, far = math.sinh(B1) / A1**2, math.sinh(B2) / A2**2
    r_Q = torch.tensor([-far, far, near, -near], dtype=torch.float64)
    return Slide("quartic maximum", torch.ones(4, dtype=torch.float64),
                 torch.tensor([B1, -B1, B2, -B2], dtype=torch.float64), r_Q / r_Q.abs().max(), start)  # fmt: skip


def steepness(slide: Slide, theta_R: Tensor) -> Tensor:
    """The steepness |J'| for theta > 0 to every digit: its two terms are combined before they are computed."""
    h_R = 2 * (theta_R / 2).sinh().square()
    scale = float(slide.r_Q.abs()[0]) * math.sinh(B1) / A1**2 / 4
    rest_R = (A2 - A1) * (2 * A1 * A2 + h_R * (A1 + A2)) / ((A1 + h_R) * (A2 + h_R)).square()
    return scale * theta_R.sinh() * h_R * rest_R


def log_change(theta_R1: Tensor, step_RE: Tensor) -> Tensor:
    """Change of log |J'| by a step, to every digit however small the step is."""
    h_R1 = 2 * (theta_R1 / 2).sinh().square()
    bend_RE = 2 * (step_RE / 2).sinh().square()
    change_RE = theta_R1.sinh() * step_RE.sinh() + theta_R1.cosh() * bend_RE  # of cosh theta
    return (
        torch.log1p(bend_RE + step_RE.sinh() / theta_R1.tanh())
        + torch.log1p(change_RE / h_R1)
        + torch.log1p(change_RE * (A1 + A2) / (2 * A1 * A2 + h_R1 * (A1 + A2)))
        - 2 * torch.log1p(change_RE / (A1 + h_R1))
        - 2 * torch.log1p(change_RE / (A2 + h_R1))
    )


@dataclass(frozen=True)
class Growth:
    """One step of the exact schedule of one prompt, from places theta_R in (0, end]."""

    theta_R: Tensor
    growth_R: Tensor
    """Mean growth E V(theta') - V(theta), over every outcome."""
    least: float
    """The least theta' / theta of a step; above 0, no run passes the maximum at 0."""

    @property
    def most(self) -> float:
        """The greatest mean growth, K."""
        return float(self.growth_R.max())


def growth(slide: Slide, places: int = 2000, begin: float = 1e-3, end: float = 8.0) -> Growth:
    """Growth on a grid of theta, at whose lower end it has long reached its limit (it is flat below 0.1)."""
    theta_R = torch.logspace(math.log10(begin), math.log10(end), places, dtype=torch.float64)
    p_RQ = slide.moments(theta_R)[2]
    norm_R = steepness(slide, theta_R)
    trace_R = (p_RQ * (slide.r_Q * (1 - p_RQ)).square()).mean(1) - norm_R.square()
    eta_R1 = (factor(norm_R.square(), trace_R, 1) / slide.smoothness)[:, None]
    step_RE = torch.cat([eta_R1 * slide.r_Q * (1 - p_RQ), torch.zeros_like(p_RQ)], 1)
    chance_RE = torch.cat([p_RQ, 1 - p_RQ], 1) / len(slide.a_Q)
    rises_RE = torch.expm1(-POWER * log_change(theta_R[:, None], step_RE))
    growth_R = norm_R**-POWER * (chance_RE * rises_RE).sum(1)
    return Growth(theta_R, growth_R, float(1 + (step_RE / theta_R[:, None]).min()))


def floor(slide: Slide, most: float, times_K: Tensor) -> tuple[Tensor, Tensor]:
    """The floor (V_0 + K t)^(-3/8) at given times, and a lower bound on its mean until then (an integral)."""
    first = steepness(slide, torch.tensor([slide.start], dtype=torch.float64)) ** -POWER
    now_K = (first + most * times_K) ** (-1 / POWER)
    share = 1 - 1 / POWER
    return now_K, ((first + most * times_K) ** share - first**share) / (share * most * times_K)


def norm_falls_slower(slide: Slide) -> list[Claim]:
    """The statement that mean E||grad J|| is O(T^-1/2) against the exponent of the floor under it."""
    found = growth(slide)
    sound = found.least > 0 and math.isfinite(found.most) and found.most > 0
    times_K = torch.logspace(12, 14, 9, dtype=torch.float64)
    exponent = slope(times_K.log(), floor(slide, found.most, times_K)[1].log()) if sound else math.nan
    note = (
        f"{slide.name}, N = G = 1: exponent in T of a floor under the mean norm; V = ||grad J||^(-8/3) grows by at "
        f"most {found.most:.4g} a step from every theta in ({float(found.theta_R[0]):g}, {float(found.theta_R[-1]):g})"
    )
    return [
        Claim("T6 for the norm: mean E||grad J|| = O(T^-1/2)", "paper, as summarised", -0.5, exponent, "<=", note=note),
        Claim("the exact schedule never passes a maximum", "derived", 0.0, found.least, ">=",
              note=f"{slide.name}, N = G = 1: least theta' / theta of a step"),
    ]  # fmt: skip


def runs_stay_above_the_floor(slide: Slide, curve: Curve) -> Claim:
    """The floor against sampled runs: the least E||grad J|| / (V_0 + K t)^(-3/8) over the times looked at."""
    floor_K, _ = floor(slide, growth(slide).most, curve.times_K.double())
    share_K = curve.now_RK.mean(0) / floor_K
    least = int(share_K.argmin())
    margin = interval(curve.now_RK[:, least] / floor_K[least])[1]
    runs = f"{len(curve.now_RK)} runs of {int(curve.times_K[-1])} steps"
    note = f"{slide.name}, {runs}: least share, at T = {int(curve.times_K[least])}"
    return Claim("E||grad J_t|| over the floor (V_0 + K t)^(-3/8)", "derived", 1.0, float(share_K[least]), ">=",
                 margin=margin, note=note)  # fmt: skip
