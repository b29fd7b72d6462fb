"""A batch whose completions come from another distribution than the policy's: an earlier policy's, or a sampler's.

Several updates on one batch weigh scores by a ratio of the policy to what it was before the first of them.

The sampler's distribution mu may be another implementation of the same weights, in other precision; the gradient is
that of the trainer's pi. With rho = pi(o|q) / mu(o|q), E_mu[rho F s] = E_pi[F s] and E_mu[rho s] = 0, so that
rho-weighted scores give the policy gradient with any baseline that does not look at its own output. min(C, rho) bounds
the variance and biases: by -E_mu[(rho - C)+ (F - b) s], which only outputs with rho > C cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblrpo.estimators import RATIOS, Ratio
from oblrpo.policy import Logps
from oblrpo.scores import Features
from oblrpo.step.batch import Batch
from oblrpo.step.gradient import Gradient, Part
from oblrpo.step.selection import Draw


@dataclass(frozen=True)
class SamplerMismatch:
    """The difference log pi - log mu of completions, with pi as it was before the first update on them."""

    log_ratio_S: Tensor
    """The log of rho of each completion, in nats and float64."""
    difference_N: Tensor
    """The size of log pi - log mu of every token, in nats."""

    @classmethod
    def of(cls, logp_SC: Tensor, sampler_logp_SC: Tensor, mask_SC: Tensor) -> SamplerMismatch:
        """Measure the mismatch on the tokens where mask_SC is not 0."""
        real_SC = mask_SC.bool()
        sampled_N = sampler_logp_SC[real_SC]
        if not (sampled_N.isfinite() & (sampled_N <= 1e-3)).all():
            raise ValueError("the sampler reports an invalid log-probability (NaN, infinite or above 0).")
        delta_SC = torch.where(real_SC, logp_SC.detach().double() - sampler_logp_SC.double(), 0)
        return cls(delta_SC.sum(1), delta_SC[real_SC].abs())

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


@dataclass(frozen=True)
class OffPolicyBatch(Batch):
    """A batch that importance weights may enter; without any it is what `Batch` is."""

    ratio: Ratio = RATIOS["sequence"]
    """What weighs scores in later updates on the batch."""
    clip_max: float | None = None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    sampler_logps_SC: Tensor | None = None
    """The log-probability of each token under the sampler, where it is to be compared."""
    features: Features | None = None
    """What the draws alone say of every output, where the sampler gives it."""
    draw: Draw | None = None
    """How outputs of the whole batch were drawn for the gradient; None where they are not."""
    old_logp_SC: Tensor | None = None
    """The log-probability of each token before the first update on the batch; None until there is one."""
    token_weight_SC: Tensor | None = None
    """The weights of tokens' scores, where the ratio is one by token; None on-policy, and before `under`."""
    clipped: Tensor | None = None
    """Which tokens, (S, C), or completions, (S, 1), the ratio has clipped; None on-policy, and before `under`."""
    mismatch: SamplerMismatch | None = None
    """The distance of the policy from the sampler, where `under` could measure it."""

    def under(self, logps: Logps) -> OffPolicyBatch:
        """The same outputs with their weights under the policy that gave these log-probabilities.

        They are the `ratio` of this policy to the old one, 1 in the first update on a batch. With a sampler that
        reports its log-probabilities, and unless its correction is off, they are multiplied by min(C, old / sampler);
        a ratio that is the importance weight itself becomes min(C, pi / sampler).
        """
        logp_SC, own_SC = logps.logp_SC.detach(), self.sequences.own_SC
        old_SC = logp_SC if self.old_logp_SC is None else self.old_logp_SC[:, : logp_SC.shape[1]]
        batch = self if self.old_logp_SC is None else self._against(old_SC, logp_SC)
        if self.sampler_logps_SC is None:
            return batch
        reported_SC = self.sampler_logps_SC[:, : logp_SC.shape[1]]
        mismatch = SamplerMismatch.of(logp_SC if self.ratio.whole else old_SC, reported_SC, own_SC)
        if self.clip_max is None:
            return replace(batch, mismatch=mismatch)
        rho_PG = mismatch.rho_S(self.clip_max).view(self.shape).to(self.rewards_PG)
        return replace(batch, rho_PG=rho_PG if self.ratio.whole else rho_PG * batch.rho_PG, mismatch=mismatch)

    @property
    def is_fresh(self) -> bool:
        """Whether no update was made on these outputs before; their gradient is then independent of all updates."""
        return self.old_logp_SC is None

    def aged(self, logp_SC: Tensor, baseline_PG: Tensor) -> OffPolicyBatch:
        """The same for later updates: this is what the old policy was, and what its completions were compared with."""
        held_PG = baseline_PG if self.ratio.by_sign else None
        return replace(self, old_logp_SC=logp_SC, baseline_PG=held_PG, rho_PG=torch.ones_like(self.rho_PG))

    def _against(self, old_SC: Tensor, logp_SC: Tensor) -> OffPolicyBatch:
        """The same with the `ratio` of a policy to the old one."""
        advantages_PG = self.rewards_PG if self.baseline_PG is None else self.rewards_PG - self.baseline_PG
        weights = self.ratio(logp_SC, old_SC, self.sequences.own_SC, advantages_PG.flatten())
        if self.ratio.by_token:
            return replace(self, token_weight_SC=weights.weight, clipped=weights.clipped)
        return replace(self, rho_PG=weights.weight.view(self.shape).to(self.rewards_PG), clipped=weights.clipped)

    def scored(self, logp_SC: Tensor) -> Tensor:
        """What the gradient of each output is taken of, (S,): sum_t m_t log pi(o_t) with the tokens' weights, or 1."""
        return super().scored(logp_SC if self.token_weight_SC is None else logp_SC * self.token_weight_SC)


def mismatch_metrics(gradient: Gradient) -> dict[str, float]:
    """The mismatch of a batch's parts as metrics; nothing where the sampler reports no log-probabilities."""
    batches = [_off_policy(part) for part in gradient.parts]
    parts = [batch.mismatch for batch in batches if batch.mismatch is not None]
    if not parts:
        return {}
    log_ratios, differences = [part.log_ratio_S for part in parts], [part.difference_N for part in parts]
    return SamplerMismatch(torch.cat(log_ratios), torch.cat(differences)).metrics(batches[0].clip_max)


def clip_metrics(gradient: Gradient) -> dict[str, float]:
    """The shares of tokens, or of completions, that a ratio has clipped, by TRL's keys; nothing where it did not bound.

    `clip_ratio/low_*` are of outputs with negative advantages, `clip_ratio/high_*` of the others, over all outputs.
    """
    shares: dict[str, list[Tensor]] = {"low": [], "high": [], "low_S": [], "high_S": []}
    total = 0.0
    for part in gradient.parts:
        batch = _off_policy(part)
        clipped, ratio = batch.clipped, batch.ratio
        if clipped is None or not math.isfinite(ratio.bounds.high):
            return {}
        counted_S1 = batch.valid_PG.flatten()[:, None]
        counted = counted_S1 & (batch.sequences.own_SC.bool() if ratio.by_token else torch.ones_like(clipped))
        positive_S1 = (batch.rewards_PG - part.baseline_PG).flatten()[:, None] > 0
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


def _off_policy(part: Part) -> OffPolicyBatch:
    assert isinstance(part.batch, OffPolicyBatch)
    return part.batch
