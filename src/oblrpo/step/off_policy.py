"""Importance weights of outputs that come from another distribution than the policy: an earlier policy, a sampler.

Several updates on one batch weigh scores by a ratio of the policy to what it was before the first of them.

The sampler's distribution mu may be another implementation of the same weights, in other precision; the gradient is
that of the trainer's pi. With rho = pi(o|q) / mu(o|q), E_mu[rho F s] = E_pi[F s] and E_mu[rho s] = 0, so that
rho-weighted scores give the policy gradient with any baseline that does not look at its own output. min(C, rho) bounds
the variance and biases: by -E_mu[(rho - C)+ (F - b) s], which only outputs with rho > C cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.estimators import advantages, ratio_weights
from oblrpo.step.flow import Batch, Part, Weighed
from oblrpo.tables.algorithms import Ratio


@dataclass(frozen=True)
class ImportanceWeights:
    """The weights of one pass over a batch; called with a part of it."""

    ratio: Ratio
    """What weighs scores in later updates on the batch."""
    clip_max: float | None = None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    sampler_logps_SC: Tensor | None = None
    """The log-probability of each token under the sampler, where it is to be compared."""
    old_token_logps_SC: Tensor | None = None
    """The log-probability of each token before the first update on the batch; None until there is one."""

    def __call__(self, part: Batch, token_logps_SC: Tensor) -> Weighed:
        """The weights of these outputs under the policy that gave these log-probabilities.

        They are the `ratio` of this policy to the old one, 1 in the first update on a batch. With a sampler that
        reports its log-probabilities, and unless its correction is off, they are multiplied by min(C, old / sampler);
        a ratio that is the importance weight itself becomes min(C, pi / sampler).
        """
        width, own_SC = token_logps_SC.shape[1], part.sequences.own_SC
        rho_PG, old_SC = torch.ones_like(part.rewards_PG), token_logps_SC
        token_weight_SC = clipped = None
        if self.old_token_logps_SC is not None:
            old_SC = self.old_token_logps_SC[part.index_S, :width]
            fixed_PG = torch.zeros_like(part.rewards_PG) if part.baseline_PG is None else part.baseline_PG
            advantages_PG = advantages(part.rewards_PG, fixed_PG)
            weights = ratio_weights(self.ratio, token_logps_SC, old_SC, own_SC, advantages_PG.flatten())
            clipped = weights.clipped
            if self.ratio.by_token:
                token_weight_SC = weights.weight
            else:
                rho_PG = weights.weight.view(part.shape).to(rho_PG)
        if self.sampler_logps_SC is None:
            return Weighed(rho_PG, token_weight_SC, clipped)
        trainer_SC = token_logps_SC if self.ratio.is_importance_weight else old_SC
        log_ratio_S, difference_N = log_ratio(trainer_SC, self.sampler_logps_SC[part.index_S, :width], own_SC)
        if self.clip_max is not None:
            corrected_PG = truncated(log_ratio_S, self.clip_max).view(part.shape).to(rho_PG)
            rho_PG = corrected_PG if self.ratio.is_importance_weight else corrected_PG * rho_PG
        return Weighed(rho_PG, token_weight_SC, clipped, log_ratio_S, difference_N)


def log_ratio(token_logps_SC: Tensor, sampler_logps_SC: Tensor, mask_SC: Tensor) -> tuple[Tensor, Tensor]:
    """The log of rho = pi / mu of each completion, (S,), and |log pi - log mu| of every token where mask_SC is not 0.

    Raises:
        ValueError: the sampler reports NaN, infinity or a number above 0.
    """
    real_SC = mask_SC.bool()
    sampled_N = sampler_logps_SC[real_SC]
    if not (sampled_N.isfinite() & (sampled_N <= 1e-3)).all():
        raise ValueError("the sampler reports an invalid log-probability (NaN, infinite or above 0).")
    delta_SC = torch.where(real_SC, token_logps_SC.detach().double() - sampler_logps_SC.double(), 0)
    return delta_SC.sum(1), delta_SC[real_SC].abs()


def truncated(log_ratio_S: Tensor, clip_max: float) -> Tensor:
    """The importance weights min(clip_max, pi / mu)."""
    return log_ratio_S.clamp(max=math.log(clip_max)).exp()


def mismatch_metrics(log_ratio_S: Tensor, difference_N: Tensor, clip_max: float | None) -> dict[str, float]:
    """The mismatch by TRL's keys, and how much of it is corrected; with clip_max None the weights are not used."""
    clip_max = math.inf if clip_max is None else clip_max
    rho_S = truncated(log_ratio_S, clip_max)
    return {
        "sampling/sampling_logp_difference/mean": difference_N.mean().item(),
        "sampling/sampling_logp_difference/max": difference_N.max().item(),
        "sampling/sequence_logp_difference/mean": log_ratio_S.abs().mean().item(),
        "sampling/importance_sampling_ratio/min": rho_S.min().item(),
        "sampling/importance_sampling_ratio/mean": rho_S.mean().item(),
        "sampling/importance_sampling_ratio/max": rho_S.max().item(),
        "sampling/truncated_ratio": (log_ratio_S > math.log(clip_max)).double().mean().item(),
    }


def sampler_metrics(parts: Sequence[Part], clip_max: float | None) -> dict[str, float]:
    """The mismatch of a batch's parts as metrics; nothing where the sampler reports no log-probabilities."""
    ratios = [part.weighed.log_ratio_S for part in parts if part.weighed.log_ratio_S is not None]
    differences = [part.weighed.difference_N for part in parts if part.weighed.difference_N is not None]
    return mismatch_metrics(torch.cat(ratios), torch.cat(differences), clip_max) if ratios else {}


def clip_metrics(parts: Sequence[Part], ratio: Ratio) -> dict[str, float]:
    """The shares of tokens, or of completions, that a ratio has clipped, by TRL's keys; nothing where it did not bound.

    `clip_ratio/low_*` are of outputs with negative advantages, `clip_ratio/high_*` of the others, over all outputs.
    """
    shares: dict[str, list[Tensor]] = {"low": [], "high": [], "low_S": [], "high_S": []}
    total = 0.0
    for part in parts:
        batch, clipped = part.batch, part.weighed.clipped
        if clipped is None or not math.isfinite(ratio.bounds.high):
            return {}
        counted_S1 = batch.valid_PG.flatten()[:, None]
        counted = counted_S1 & (batch.sequences.own_SC.bool() if ratio.by_token else torch.ones_like(clipped))
        positive_S1 = advantages(batch.rewards_PG, part.baseline_PG).flatten()[:, None] > 0
        total += float(counted.sum())
        for name, which in (("low", clipped & ~positive_S1), ("high", clipped & positive_S1)):
            shares[name].append((which & counted).sum())
            shares[f"{name}_S"].append((which & counted).sum(1) / counted.sum(1).clamp(min=1))
    low, high = (float(torch.stack(shares[name]).sum()) / total for name in ("low", "high"))
    if not math.isfinite(ratio.bounds.low):
        return {"cispo_clip_ratio": high}
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/low_min": float(torch.cat(shares["low_S"]).min()),
        "clip_ratio/high_mean": high,
        "clip_ratio/high_max": float(torch.cat(shares["high_S"]).max()),
        "clip_ratio/region_mean": low + high,
    }
