"""Signal and noise of a batch gradient, from the squared norms of its prompts' gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators.baselines import mean_of_others


@dataclass(frozen=True)
class Moments:
    """What one batch of N prompts says about the true gradient and about the noise of one prompt's.

    Units: squared gradient norm for `signal2`, `trace_cov` and `spared`, prompts for `critical_batch_size`.
    """

    signal2: float
    """An unbiased estimate of || grad J ||^2; negative by chance where noise drowns the signal."""
    trace_cov: float
    """An unbiased estimate of N times the variance of the batch gradient: tr H, the total variance of one prompt's,
    where prompts are independent. It is negative by chance only where the batch holds a good part of all prompts
    (`of_rows`)."""
    n: int
    """The number N of prompts in the batch."""
    spared: float = 0.0
    """The variance that a batch lacks because no prompt is in it twice; 0 where prompts are without number."""

    @property
    def snr(self) -> float:
        """The ratio || grad J ||^2 / tr H, never below 0; infinite without noise, 0 where there is no gradient."""
        signal2 = max(self.signal2, 0.0)
        if self.trace_cov > 0:
            return signal2 / self.trace_cov
        return math.inf if signal2 > 0 else 0.0

    @property
    def n_snr(self) -> float:
        """The signal-to-noise ratio of the batch gradient, N SNR."""
        return self.n * self.snr

    @property
    def has_gradient(self) -> bool:
        """Whether any prompt of the batch has a gradient at all."""
        return self.signal2 != 0 or self.trace_cov != 0

    @property
    def critical_batch_size(self) -> float:
        """The number of prompts at which noise equals signal: 1 / SNR (McCandlish et al. 2018, B_noise).

        Of a batch of n prompts the noise is trace_cov / N + spared times N / n, less spared.
        """
        if self.snr == 0:
            return math.inf
        return (self.trace_cov + self.n * self.spared) / (self.signal2 + self.spared) if self.trace_cov > 0 else 0.0

    def of_rows(self, own2: float, rows: int) -> Moments:
        """The moments of a batch that was drawn from so many prompts, none of them twice.

        What differs between prompts is not noise in a batch that holds them all. With B = own2 - S, S as it was, the
        variance of the prompts' own mean gradients mu_q over all M of them, such a batch lacks F = B / M of variance,
        and its pairs of prompts F of signal: S + F and T - N F are unbiased (finite population correction).

        Args:
            own2: an unbiased estimate of mean_q ||mu_q||^2 (`own_norm2`); NaN, where no prompt has two outputs that
                count, corrects nothing.
            rows: the number M of prompts that there are, at least N.
        """
        spared = 0.0 if math.isnan(own2) else (own2 - self.signal2) / rows
        return Moments(self.signal2 + spared, self.trace_cov - self.n * spared, self.n, spared)


def moments(
    group_norm2_P: Tensor, mean_norm2: Tensor | float, prompts_per_group: int = 1, estimated: bool = False
) -> Moments:
    """Unbiased moments from N = m k prompts in m independent blocks of k (k = 1: every prompt is its own block).

    With g_i the mean gradient of block i over its prompts and g = mean_i g_i:
    tr H = N / (m - 1) (mean_i ||g_i||^2 - ||g||^2), ||grad J||^2 = (m ||g||^2 - mean_i ||g_i||^2) / (m - 1). Both
    are unbiased. A signal below 1e-6 of the mean squared norm counts as 0, as it is where one prompt alone has a
    gradient: norms that were summed in float32 are off by up to 1e-7 then, and the noise of S is far more than 1e-6.

    Prompts are taken for independent. Baselines that look at other prompts couple them: the signal is then too high,
    under `oblr_shrunk` by less than 0.001 of the noise once its prior is full of earlier steps, and by more in the
    first steps of few prompts.

    Args:
        group_norm2_P: the squared norms ||g_i||^2, (m,).
        mean_norm2: the squared norm ||g||^2 before any clipping.
        prompts_per_group: the number k of prompts in a block.
        estimated: whether group_norm2_P are unbiased estimates, of which some may be negative by chance.

    Raises:
        ValueError: fewer than two blocks, or a norm that is negative, NaN or infinite.

    Examples:
        Four prompts' gradients (1, 1), (1, -1), (1, 1), (1, -1): a signal of (1, 0), noise across it.

        >>> batch = moments(torch.tensor([2.0, 2.0, 2.0, 2.0]), mean_norm2=1.0)
        >>> f"{batch.signal2:.3f} {batch.trace_cov:.3f} {batch.n_snr:.1f} {batch.critical_batch_size:.1f}"
        '0.667 1.333 2.0 2.0'
    """
    blocks = group_norm2_P.numel()
    if group_norm2_P.ndim != 1 or blocks < 2:
        raise ValueError(f"moments need at least 2 prompt gradients, got shape {tuple(group_norm2_P.shape)}.")
    mean_of_norms, norm_of_mean = group_norm2_P.detach().double().mean().item(), float(mean_norm2)
    if not (math.isfinite(mean_of_norms) and math.isfinite(norm_of_mean)):
        raise ValueError("a gradient norm is NaN or infinite.")
    if norm_of_mean < 0 or (not estimated and bool((group_norm2_P < 0).any())):
        raise ValueError("a squared gradient norm is negative.")
    n = blocks * prompts_per_group
    signal2 = (blocks * norm_of_mean - mean_of_norms) / (blocks - 1)
    signal2 = signal2 if abs(signal2) > 1e-6 * mean_of_norms else 0.0
    trace_cov = max(0.0, n / (blocks - 1) * (mean_of_norms - norm_of_mean))  # rounding can put 0 below 0
    return Moments(signal2=signal2, trace_cov=trace_cov, n=n)


def own_norm2(gram_PGG: Tensor, rewards_PG: Tensor, valid_PG: Tensor) -> float:
    """An unbiased estimate of mean_q ||mu_q||^2, mu_q = E[F s | q]; NaN where no prompt has two outputs that count.

    Of n outputs it is the mean over pairs j != k of c_j c_k <s_j, s_k> / (1 + 1 / (n - 1)^2), with c_j = F_j less the
    mean reward of the prompt's other outputs. Since k is among those, and j among those of k, c_j c_k is
    F_j F_k (1 + 1 / (n - 1)^2) and terms that lack one of the two; these have the mean 0, because E[s | q] = 0.

    Args:
        gram_PGG: the inner products <s_j, s_k> of the scores of each prompt's outputs, or unbiased estimates; of all
            prompts, or of some, chosen without a look at what they earned (or weighted for it).
        rewards_PG: the rewards F.
        valid_PG: which outputs count; what stands in the other places is ignored.
    """
    count_P, valid_PG = valid_PG.sum(1).double(), valid_PG.bool()
    c_PG = torch.where(valid_PG, rewards_PG.double(), 0)
    c_PG = torch.where(valid_PG, c_PG - mean_of_others(c_PG, valid_PG.double()), 0)
    apart_GG = ~torch.eye(valid_PG.shape[1], dtype=torch.bool, device=valid_PG.device)
    both_PGG = valid_PG[:, :, None] & valid_PG[:, None] & apart_GG
    pairs_P = group_norm2(torch.where(both_PGG, gram_PGG, 0), c_PG)
    own2_P = pairs_P * (count_P - 1) / (count_P * ((count_P - 1).square() + 1))
    return float(own2_P[count_P > 1].mean())


def group_norm2(gram_PGG: Tensor, coef_PG: Tensor) -> Tensor:
    """The squared norm || sum_j a_j s_j ||^2 of every prompt's gradient, (P,), from its scores' inner products.

    It serves loops that take the gradient elsewhere and keep no scores; `ScoreTape.accumulate` gives the same directly.
    Inner products gram_PGG that are right on average (with exact norms on the diagonal) give norms that are right on
    average, and may fall below 0. coef_PG are the a_j; 0 for outputs that do not count.

    Raises:
        ValueError: the shapes do not fit.
    """
    if gram_PGG.shape != (*coef_PG.shape, coef_PG.shape[-1]):
        raise ValueError(f"gram_PGG {tuple(gram_PGG.shape)} and coef_PG {tuple(coef_PG.shape)} do not fit.")
    coef_PG = coef_PG.double()
    norm2_P: Tensor = torch.einsum("pj,pjk,pk->p", coef_PG, gram_PGG.double(), coef_PG)
    return norm2_P


def kappa(norm2_PG: Tensor, rewards_PG: Tensor) -> float:
    """How much larger weights are where rewards are high: E[w | F high] / E[w | F low].

    The split lies halfway between the batch's least and greatest reward, so that rewards of 0 and 1 give
    E[w | F = 1] / E[w | F = 0]. The result is NaN where all rewards are equal.

    Examples:
        >>> kappa(torch.tensor([[1.0, 4.0, 4.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        0.25
    """
    high_PG = rewards_PG > (rewards_PG.min() + rewards_PG.max()) / 2
    return (norm2_PG[high_PG].mean() / norm2_PG[~high_PG].mean()).item()


def moments_of_halves(inner2: float, norm2: float, prompts: tuple[int, int]) -> Moments:
    """Unbiased moments from the two halves of a batch, of N = n + m prompts, whose gradients were taken one by one.

    With g = (1/N) sum_i g_i = A + B, the sums over either half: E <A, B> = (n m / N^2) ||grad J||^2, because the halves
    are independent, and E||g||^2 = ||grad J||^2 + tr H / N. So S = N^2 / (n m) <A, B> and T = N (||g||^2 - S). No norm
    of a prompt's own gradient is needed. S has twice the variance that it has from all pairs of prompts. T may be
    below 0 by chance where there is next to no noise. As in `moments`, what rounding alone would make of it is 0.

    Args:
        inner2: <A, B>.
        norm2: ||g||^2, before any clipping.
        prompts: how many prompts each half has, at least 1.

    Raises:
        ValueError: a number is NaN or infinite, the norm negative, or a half empty.
    """
    n, m = prompts
    if min(n, m) < 1 or not math.isfinite(inner2) or not math.isfinite(norm2) or norm2 < 0:
        raise ValueError(f"halves of {n} and {m} prompts, <A, B> = {inner2:g} and ||g||^2 = {norm2:g} give no moments.")
    signal2 = (n + m) ** 2 / (n * m) * inner2
    return Moments(signal2 if abs(signal2) > 1e-6 * norm2 else 0.0, (n + m) * (norm2 - signal2), n + m)


def squared_norm(parameters: list[torch.nn.Parameter]) -> float:
    """The squared norm of these parameters' `.grad`: || g ||^2.

    Gradients sharded over ranks (FSDP2) are summed over those; every rank must call.
    """
    return inner((p.grad, p.grad) for p in parameters if p.grad is not None)


BLOCK = 4096
"""How many products are summed in float32; sums of blocks are in float64."""
SAFE = 1e-20, 1e30
"""The size of an inner product in which no product that counts has left float32's range."""


def inner(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The inner product of two lists of tensors, given as pairs of equal shapes: sum_i x_i'y_i.

    Products are summed in float64 where float32 cannot hold them. Tensors sharded over ranks (FSDP2) are summed over
    those; every rank must call.
    """
    pairs = list(pairs)
    total = _inner(pairs, torch.float32)
    return total if SAFE[0] < abs(total) < SAFE[1] else _inner(pairs, torch.float64)


def _inner(pairs: list[tuple[Tensor, Tensor]], least: torch.dtype) -> float:
    by_layout: dict[Any, list[Tensor]] = {}  # by the mesh and the axes over which the ranks' shares add up
    for x, y in pairs:
        sharded: Any = x if hasattr(x, "to_local") else None
        layout = None if sharded is None else (sharded.device_mesh, sharded.placements)
        x, y = (each.to_local() if hasattr(each, "to_local") else each for each in (x, y))
        wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), least)
        x_N, y_N = (each.reshape(-1).to(wide) for each in (x, y))
        whole = len(x_N) - len(x_N) % BLOCK
        blocks_K = torch.linalg.vecdot(x_N[:whole].view(-1, BLOCK), y_N[:whole].view(-1, BLOCK))
        share = blocks_K.double().sum() + torch.dot(x_N[whole:], y_N[whole:]).double()
        by_layout.setdefault(layout, []).append(share)
    total = 0.0
    for layout, shares in by_layout.items():
        share = torch.stack(shares).sum()
        if layout is not None:
            from torch.distributed.tensor import DTensor, Partial  # slow to import, and seldom needed

            partial = [Partial() if placement.is_shard() else placement for placement in layout[1]]
            share = DTensor.from_local(share, layout[0], partial, run_check=False).full_tensor()
        total += float(share)
    return total
