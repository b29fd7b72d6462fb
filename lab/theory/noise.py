"""What one batch says of signal and noise: unbiased moments, and the bias of plug-ins. Derived (no paper).

For N Gaussian prompt gradients of D parameters with covariance I and N SNR = x, N ||g||^2 is chi^2 of D degrees with
noncentrality D x and (N-1) T that of (N-1) D degrees, apart: what the factor is on average is an integral.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab.theory import exact
from lab.theory.claims import Claim, Measurement, interval
from lab.theory.worlds import World
from oblrpo import estimators

N_SNRS = (0.0, 0.5, 2.0)
DIMENSIONS = (1, 2, 64)
MODES: tuple[str, ...] = ("plugin", "debiased")


def moments_are_unbiased(world: World, N: int, G: int, per_block: int = 1, name: str = "rloo") -> list[Claim]:
    """One batch's moments are unbiased, E S = ||grad J||^2 and E T = tr H, over every batch of N prompts."""
    blocks = N // per_block
    chance_B, gradient_BND = exact.batches(*exact.prompt_gradients(world, exact.named(name), G), N)
    block_BMD = gradient_BND.unflatten(1, (blocks, per_block)).mean(2)
    norm2_BM, norm2_B = block_BMD.square().sum(2), gradient_BND.mean(1).square().sum(1)
    found = [estimators.moments(each_M, float(mean), per_block) for each_M, mean in zip(norm2_BM, norm2_B, strict=True)]
    of = lambda values: float(chance_B @ torch.tensor(values, dtype=torch.float64))  # noqa: E731
    where = f"{world.name}, every batch of {N} in {blocks} blocks, G = {G}, {name}"
    trace = exact.group_moments(world, exact.named(name), G).trace
    return [
        Claim("S of one batch is unbiased for ||grad J||^2", "derived", float(world.gradient_D.square().sum()),
              of([each.signal2 for each in found]), note=where),
        Claim("T of one batch is unbiased for tr H", "derived", trace, of([each.trace_cov for each in found]),
              note=where),
    ]  # fmt: skip


def expected_factor(mode: str, n_snr: float, N: int, D: int, nodes: int = 4000) -> float:
    """Mean of the schedule's factor on one such batch, by quadrature.

    With u = A / (A + B), A = N ||g||^2 and B = (N-1) T: plug-in A / (A + T) = u / (u + (1-u)/(N-1)); debiased
    max(0, 1 - T / A) = max(0, 1 - (1-u) / ((N-1) u)). u is Beta(D/2 + j, (N-1) D/2), j Poisson of mean D x / 2;
    u = sin^2 phi makes its density smooth.
    """
    phi_K = (torch.arange(nodes, dtype=torch.float64) + 0.5) * math.pi / 2 / nodes
    u_K = phi_K.sin().square()
    odds_K = (1 - u_K) / ((N - 1) * u_K)
    value_K = 1 / (1 + odds_K) if mode == "plugin" else (1 - odds_K).clamp(min=0)
    mean = D * n_snr / 2
    j_J = torch.arange(int(mean + 12 * math.sqrt(mean) + 20) if mean else 1, dtype=torch.float64)
    chance_J = (torch.xlogy(j_J, torch.tensor(mean)) - mean - torch.lgamma(j_J + 1)).exp()
    log_JK = (D + 2 * j_J[:, None] - 1) * phi_K.sin().log() + ((N - 1) * D - 1) * phi_K.cos().log()
    return float(chance_J @ (log_JK.softmax(1) @ value_K) / chance_J.sum())


def expected_plugin(n_snr: float, N: int, D: int) -> float:
    """Mean of N ||g||^2 / T on one such batch, (1 + x) (N-1) D / ((N-1) D - 2)."""
    return (1 + n_snr) * (N - 1) * D / ((N - 1) * D - 2)


def draw(n_snr: float, N: int, D: int, batches: int, seed: int) -> list[estimators.Moments]:
    """Moments of batches of N gradients of covariance I with the signal along one axis."""
    generator = torch.Generator().manual_seed(seed)
    gradient_BND = torch.randn(batches, N, D, generator=generator, dtype=torch.float64)
    gradient_BND[..., 0] += math.sqrt(D * n_snr / N)
    norm2_BN, mean2_B = gradient_BND.square().sum(2), gradient_BND.mean(1).square().sum(1)
    return [estimators.moments(each_N, float(mean)) for each_N, mean in zip(norm2_BN, mean2_B, strict=True)]


def factors(mode: str, found: list[estimators.Moments]) -> Tensor:
    """Factor that `SNRSchedule` sets from each batch alone, (B,)."""
    schedule = estimators.SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), mode, ema=0.0)
    return torch.tensor([schedule.step(each) for each in found], dtype=torch.float64)


def schedule_on_one_batch(
    batches: int = 2000, N: int = 16, seed: int = 0, dimensions: tuple[int, ...] = DIMENSIONS
) -> tuple[list[Claim], list[Measurement]]:
    """The plug-in factor stays near 1/2 without signal, the debiased falls; each against its exact mean.

    Effective dimension (tr H)^2 / tr H^2 is D: where it is small, the plug-in falls further.
    """
    claims, ideals = [], []
    for D in dimensions:
        for number, n_snr in enumerate(N_SNRS):
            found = draw(n_snr, N, D, batches, seed + 100 * D + number)
            where = f"N SNR {n_snr:g}, N = {N}, effective dimension {D}"
            ideal = n_snr / (1 + n_snr)
            for mode in MODES:
                mean, margin = interval(factors(mode, found))
                claims.append(Claim(f"mean {mode} factor of one batch", "derived", expected_factor(mode, n_snr, N, D),
                                    mean, margin=margin,
                                    note=f"{where}: ideal {ideal:.3f}; {batches} batches"))  # fmt: skip
                ideals.append(Measurement(f"mean {mode} factor, ideal {ideal:.2f}", where, mean, margin))
            plugin = torch.tensor([N * (each.signal2 + each.trace_cov / N) / each.trace_cov for each in found])
            mean, margin = interval(plugin)
            if (N - 1) * D > 20:  # its variance is finite, and the interval means something
                claims.append(Claim("plug-in N SNR is too high by about 1", "derived", expected_plugin(n_snr, N, D),
                                    mean, margin=margin, note=f"{where}: {batches} batches"))  # fmt: skip
    return claims, ideals


def plugin_floor(N: int = 16) -> list[Claim]:
    """Without signal the plug-in factor is within 0.01 of 1/2 in many effective dimensions, and not in few."""
    return [
        Claim("without signal the plug-in factor is 1/2, to 0.01", "derived", 0.5, expected_factor("plugin", 0.0, N, D),
              tolerance=0.02, note=f"N = {N}, effective dimension {D}, by quadrature")
        for D in (DIMENSIONS[-1], DIMENSIONS[0])
    ]  # fmt: skip
