"""How far the sampler's probabilities are from the trainer's, and the importance weights that make up for it.

Completions come from the sampler's distribution mu (another implementation of the same weights, in other precision);
the gradient is that of the trainer's pi. With rho = pi(o|q) / mu(o|q), E_mu[rho F s] = E_pi[F s] and E_mu[rho s] = 0,
so that rho-weighted scores give the policy gradient with any baseline that does not look at its own output.
min(C, rho) bounds the variance and biases: by -E_mu[(rho - C)+ (F - b) s], which only outputs with rho > C cause.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.settings import RolloutConfig, lost

CORRECTIONS = {"auto": 3.0, "truncated": 3.0, "untruncated": math.inf, "measured": None}
"""What the setting `sampler_correction` may be -> the C of min(C, pi / mu); None: no weights are taken."""


@dataclass(frozen=True)
class SamplerMismatch:
    """The difference log pi - log mu of completions, with pi as it was before the first update on them."""

    log_ratio_S: Tensor
    """The log of rho of each completion, in nats and float64."""
    difference_N: Tensor
    """The size of log pi - log mu of every token, in nats."""

    @classmethod
    def of(cls, logp_SC: Tensor, sampler_logp_SC: Tensor, mask_SC: Tensor) -> SamplerMismatch:
        """Measure the mismatch on the tokens where mask_SC is not 0.

        Raises:
            ValueError: the sampler's log-probability of a token is NaN, infinite, or of a probability above 1.
        """
        real_SC = mask_SC.bool()
        sampled_N = sampler_logp_SC[real_SC]
        if not (sampled_N.isfinite() & (sampled_N <= 1e-3)).all():
            raise ValueError("the sampler reports a log-probability that is none (NaN, infinite or above 0).")
        delta_SC = torch.where(real_SC, logp_SC.detach().double() - sampler_logp_SC.double(), 0)
        return cls(delta_SC.sum(1), delta_SC[real_SC].abs())

    @classmethod
    def join(cls, blocks: list[SamplerMismatch]) -> SamplerMismatch:
        """Put the mismatch of all micro-batches together."""
        return cls(torch.cat([each.log_ratio_S for each in blocks]), torch.cat([each.difference_N for each in blocks]))

    def rho_S(self, clip_max: float) -> Tensor:
        """The importance weights min(clip_max, pi / mu)."""
        return self.log_ratio_S.clamp(max=math.log(clip_max)).exp()

    def metrics(self, clip_max: float | None) -> dict[str, float]:
        """The mismatch by TRL's keys, and how much of it is corrected; with clip_max None the weights are not used."""
        clip_max = math.inf if clip_max is None else clip_max
        rho_S = self.rho_S(clip_max)
        return {
            "sampling/sampling_logp_difference/mean": self.difference_N.mean().item(),
            "sampling/sampling_logp_difference/max": self.difference_N.max().item(),
            "sampling/sequence_logp_difference/mean": self.log_ratio_S.abs().mean().item(),
            "sampling/importance_sampling_ratio/min": rho_S.min().item(),
            "sampling/importance_sampling_ratio/mean": rho_S.mean().item(),
            "sampling/importance_sampling_ratio/max": rho_S.max().item(),
            "sampling/truncated_ratio": (self.log_ratio_S > math.log(clip_max)).double().mean().item(),
        }


def clip_max_of(rollout: RolloutConfig) -> float | None:
    """The C of min(C, pi / mu), infinite where weights are not truncated; None: the sampler is taken for the policy.

    Raises:
        InputError: `sampler_correction` is none of those that there are.
    """
    name, colon, number = rollout.sampler_correction.partition(":")
    if name not in CORRECTIONS or (colon and name != "truncated"):
        raise InputError(
            f"unknown sampler_correction {rollout.sampler_correction!r}; choose one of: {', '.join(CORRECTIONS)}, or "
            f"truncated:C with a number C.{lost('sampler_correction', rollout.sampler_correction)}"
        )
    if not colon:
        return CORRECTIONS[name]
    clip_max = float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else math.nan
    if not clip_max >= 1:
        raise InputError(
            f"sampler_correction is {rollout.sampler_correction}; its C must be a number of at least 1: below, it "
            "would cut weights that need no correction."
        )
    return clip_max
