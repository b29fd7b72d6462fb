"""The records of a step: Samples -> Batch -> Gradient -> Update, and a StepResult of all; importance weights.

`policy.Sequences` are tokens. Samples add the rewards F of P prompts with G outputs each; a batch adds how each F - b
enters the mean; a gradient is that of one pass over the batch, and an update is what was made of it. All of them are
read-only. Row p G + j of what has an axis S is output j of prompt p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.estimators import NORMALISATIONS, WEIGHTINGS, ratio_weights
from oblrpo.policy import Sequences
from oblrpo.policy.sequences import rows_of
from oblrpo.rollout import Rollouts, join
from oblrpo.scores import Features
from oblrpo.tables.algorithms import Algorithm, Ratio

NO_SIGNAL = dict.fromkeys(("lr_factor", "snr", "n_snr", "signal2", "trace_cov"), 0.0)
"""The metrics of a step that has no signal, and so makes no update."""


@dataclass(frozen=True)
class Samples:
    """Completions of P prompts, G of each, with their rewards."""

    rollouts: Rollouts
    rewards_PG: Tensor
    """The rewards F; the value of an output without a reward means nothing."""
    valid_PG: Tensor
    """Which outputs have a reward."""

    @property
    def features(self) -> Features:
        """What the draws tell of every output.

        Raises:
            ValueError: the sampler was not asked to keep it.
        """
        if self.rollouts.features is None:
            raise ValueError("the sampler has kept no features of its draws.")
        return self.rollouts.features

    def at(self, index_P: Tensor) -> Samples:
        """The completions of some of the prompts."""
        index_P = index_P.to(self.rewards_PG.device)
        rows_S = rows_of(index_P, self.rewards_PG.shape[1])
        return Samples(self.rollouts.at(rows_S), self.rewards_PG[index_P], self.valid_PG[index_P])

    @classmethod
    def join(cls, blocks: Sequence[Samples]) -> Samples:
        """The completions of all the prompts of several blocks."""
        return cls(
            join([block.rollouts for block in blocks]),
            torch.cat([block.rewards_PG for block in blocks]),
            torch.cat([block.valid_PG for block in blocks]),
        )


@dataclass(frozen=True)
class Batch:
    """The outputs that gradients are taken of, and how each enters the mean.

    The gradient is g = (1/P') sum_i g_i over the P' prompts that take part, with g_i = (1/G_i) sum_j over the G_i
    outputs of prompt i that count.
    """

    sequences: Sequences
    rewards_PG: Tensor
    """The rewards F; 0 where an output does not count."""
    valid_PG: Tensor
    """Which outputs count."""
    divisor_PG: Tensor
    """The algorithm's normalisation, which F - b is divided by."""
    weight_PG: Tensor
    """The algorithm's loss weighting, which F - b is multiplied by."""

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        rewards_PG: Tensor,
        valid_PG: Tensor | None = None,
        algorithm: Algorithm = Algorithm("none"),  # noqa: B008  (frozen)
        *,
        longest: int = 1,
    ) -> Batch:
        """Return a batch, of which prompts with fewer valid outputs than the algorithm compares take no part.

        Args:
            sequences: the completions.
            rewards_PG: the rewards F; what stands in the place of an output that is not valid is ignored, NaN too.
            valid_PG: which outputs have a reward; all if None.
            algorithm: the algorithm whose normalisation and loss weighting apply.
            longest: the longest completion allowed, in tokens.
        """
        if valid_PG is None:
            valid_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
        if valid_PG.shape != rewards_PG.shape:
            raise ValueError(f"valid_PG has shape {tuple(valid_PG.shape)}, rewards_PG {tuple(rewards_PG.shape)}.")
        valid_PG = valid_PG.bool() & (valid_PG.sum(1, keepdim=True) >= algorithm.smallest_group)
        rewards_PG = torch.where(valid_PG, rewards_PG, 0)
        lengths_PG = sequences.lengths_S.view_as(rewards_PG).to(rewards_PG)
        divisor_PG = NORMALISATIONS[algorithm.normalisation](rewards_PG, valid_PG).expand_as(rewards_PG)
        weight_PG = WEIGHTINGS[algorithm.weighting](lengths_PG, longest, valid_PG)
        return cls(sequences, rewards_PG, valid_PG, divisor_PG, weight_PG)

    @property
    def count_P(self) -> Tensor:
        """The number G_i of each prompt's outputs that count."""
        return self.valid_PG.sum(1)

    @property
    def prompts(self) -> int:
        """The number P' of prompts that take part."""
        return int(self.valid_PG.any(1).sum())

    @property
    def own_PGT(self) -> Tensor:
        """The policy's own tokens, by prompt and output."""
        return self.sequences.own_SC.view(*self.rewards_PG.shape, -1)

    @property
    def mean_length(self) -> float:
        """The mean length of the outputs that count, in tokens."""
        return float(self.sequences.lengths_S.view_as(self.valid_PG)[self.valid_PG].double().mean())


@dataclass(frozen=True)
class Weighed:
    """What the scores of some outputs are multiplied by, where they come from another distribution than the policy."""

    rho_S: Tensor
    """Importance weights of whole outputs."""
    token_weight_SC: Tensor | None = None
    """Weights of single tokens' scores, where the ratio is one by token."""
    clipped: Tensor | None = None
    """Which tokens, (S, C), or completions, (S, 1), the ratio has clipped; None in the first pass over a batch."""
    log_ratio_S: Tensor | None = None
    """log pi - log mu of each completion under the sampler mu, in nats and float64, where mu reports it."""
    difference_N: Tensor | None = None
    """The size of log pi - log mu of every token, in nats."""

    @classmethod
    def of(cls, blocks: Sequence[Tensor], parts: Sequence[Weighed], batch: Batch) -> Weighed:
        """The weights of all outputs, from those of blocks of rows; of an output in no block 1, and nothing clipped.

        Weights of single tokens are not kept, and what compares with a sampler is that of the outputs in blocks.
        """
        S, C = batch.sequences.own_SC.shape
        rho_S, clipped = torch.ones_like(batch.rewards_PG).flatten(), None
        for rows_S, part in zip(blocks, parts, strict=True):
            rho_S[rows_S] = part.rho_S.to(rho_S)
            if part.clipped is not None:
                clipped = part.clipped.new_zeros(S, C) if clipped is None else clipped
                clipped[rows_S, : part.clipped.shape[1]] = part.clipped
        ratios = [part.log_ratio_S for part in parts if part.log_ratio_S is not None]
        differences = [part.difference_N for part in parts if part.difference_N is not None]
        joined = (torch.cat(values) if values else None for values in (ratios, differences))
        return cls(rho_S, None, clipped, *joined)


@dataclass(frozen=True)
class Gradient:
    """The gradient of one pass over a batch (left in `.grad`, as that of the loss -J), and what was learned on the way.

    Values of outputs that did not go through the model, because their advantage is 0, are NaN where nothing is known.
    """

    batch: Batch
    """The batch that it was taken of."""
    norm2: float
    """The squared norm || g ||^2 of the batch gradient, before any clipping."""
    inner2: float
    """The inner product of its two parts: the sums over the first and the second half of the prompts."""
    halves: tuple[int, int]
    """How many prompts each half has."""
    advantages_PG: Tensor
    """The advantages A = F - b; 0 where an output does not count, or has no token of its own."""
    token_logps_SC: Tensor
    """The log-probability of every token, in nats; 0 where none is the policy's own."""
    weighed: Weighed
    """What the scores of all outputs were multiplied by."""

    @property
    def ess_ratio(self) -> float:
        """The effective sample size over the batch's, (sum rho)^2 / (B sum rho^2); 1 where all rho are 0."""
        rho_N = self.weighed.rho_S[self.trained_S].double()
        one_N = torch.ones_like(rho_N)  # dot products: sums in another order would change the last bit of a rate
        return float((one_N @ rho_N) ** 2 / (len(rho_N) * (one_N @ rho_N.square()))) if rho_N.any() else 1.0

    @property
    def trained_S(self) -> Tensor:
        """Which outputs went through the model."""
        return self.advantages_PG.flatten() != 0


@dataclass(frozen=True)
class Update:
    """The outcome of one update."""

    gradient: Gradient
    moments: estimators.Moments
    """Signal and noise of the batch."""
    factor: float
    """The factor on eta_0 that the update was really made with; 0 where there was no gradient."""
    learning_rate: float
    """The rate really used; 0 where there was no gradient, and so no update."""
    smoothed: estimators.Moments
    """Signal and noise, averaged over steps; the batch's own where no update was made."""
    snr_interval: tuple[float, float]
    """95 % interval of the averaged signal-to-noise ratio."""
    kl: float | None
    """The KL divergence by which the update moved the policy, in nats, where it was measured."""
    target_kl: float = math.nan
    """The KL that the schedule meant the update to take; NaN where it has no such aim."""


@dataclass(frozen=True)
class StepResult:
    """One step of a run: the completions, their rewards, and the updates on them."""

    samples: Samples
    """With the rewards as they were earned, neither clipped nor less a penalty."""
    updates: Sequence[Update] = ()
    """There is none if fewer than two prompts have as many valid outputs as the baseline needs, if all rewards agree,
    or if the gradient was not finite."""
    skipped: str = ""
    """What was not finite, where an update was left out for it."""
    without_signal: bool = False
    """Whether no reward differed from another."""
    baseline_PG: Tensor | None = None
    """The baseline b, which all updates have in common."""
    norm2_PG: Tensor | None = None
    """The exact squared score norms of the outputs that were looked at, NaN of the others; None without a look."""
    kl_PG: Tensor | None = None
    """log(pi / pi_ref) of each completion, where a KL penalty is on."""
    further: dict[str, float] = field(default_factory=dict)
    """Metrics of some steps: the ledger, proxies beside exact norms, the sampler's mismatch, what was clipped."""
    all_samples: Samples | None = None
    """All that was sampled, where some of it was dropped before anything was learned from it."""
    rounds: int | None = None
    """How many times prompts were sampled for it, set with dynamic sampling only."""


@dataclass(frozen=True)
class ImportanceWeights:
    """The weights of one pass over a batch, whose outputs come from an earlier policy or another sampler.

    Several updates on one batch weigh scores by a ratio of the policy to what it was before the first of them.

    The sampler's distribution mu may be another implementation of the same weights, in other precision; the gradient is
    that of the trainer's pi. With rho = pi(o|q) / mu(o|q), E_mu[rho F s] = E_pi[F s] and E_mu[rho s] = 0, so that
    rho-weighted scores give the policy gradient with any baseline that does not look at its own output. min(C, rho)
    bounds the variance and biases: by -E_mu[(rho - C)+ (F - b) s], which only outputs with rho > C cause.
    """

    ratio: Ratio
    """What weighs scores in later updates on the batch."""
    clip_max: float | None = None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    sampler_logps_SC: Tensor | None = None
    """The log-probability of each token under the sampler, where it is to be compared."""
    old_token_logps_SC: Tensor | None = None
    """The log-probability of each token before the first update on the batch; None until there is one."""

    def __call__(self, rows_S: Tensor, token_logps_SC: Tensor, own_SC: Tensor, advantages_S: Tensor) -> Weighed:
        """The weights of some of the outputs under the policy that gave these log-probabilities.

        They are the `ratio` of this policy to the old one, 1 in the first update on a batch. With a sampler that
        reports its log-probabilities, and unless its correction is off, they are multiplied by min(C, old / sampler);
        a ratio that is the importance weight itself becomes min(C, pi / sampler).
        """
        width, rho_S, old_SC = token_logps_SC.shape[1], torch.ones_like(advantages_S), token_logps_SC
        token_weight_SC = clipped = None
        if self.old_token_logps_SC is not None:
            old_SC = self.old_token_logps_SC[rows_S, :width]
            weights = ratio_weights(self.ratio, token_logps_SC, old_SC, own_SC, advantages_S)
            clipped = weights.clipped
            if self.ratio.by_token:
                token_weight_SC = weights.weight
            else:
                rho_S = weights.weight.view_as(rho_S).to(rho_S)
        if self.sampler_logps_SC is None:
            return Weighed(rho_S, token_weight_SC, clipped)
        trainer_SC = token_logps_SC if self.ratio.is_importance_weight else old_SC
        log_ratio_S, difference_N = log_ratio(trainer_SC, self.sampler_logps_SC[rows_S, :width], own_SC)
        if self.clip_max is not None:
            corrected_S = truncated(log_ratio_S, self.clip_max).to(rho_S)
            rho_S = corrected_S if self.ratio.is_importance_weight else corrected_S * rho_S
        return Weighed(rho_S, token_weight_SC, clipped, log_ratio_S, difference_N)


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


def sampler_metrics(weighed: Weighed, clip_max: float | None) -> dict[str, float]:
    """The mismatch as metrics, of the outputs that were trained on; nothing where the sampler reports nothing."""
    if weighed.log_ratio_S is None or weighed.difference_N is None:
        return {}
    return mismatch_metrics(weighed.log_ratio_S, weighed.difference_N, clip_max)


def clip_metrics(gradient: Gradient, ratio: Ratio) -> dict[str, float]:
    """The shares of tokens, or of completions, that a ratio has clipped, by TRL's keys; nothing where it did not bound.

    `clip_ratio/low_*` are of outputs with negative advantages, `clip_ratio/high_*` of the others, over all outputs that
    count: one whose advantage is 0 is not clipped.
    """
    clipped, valid_S = gradient.weighed.clipped, gradient.batch.valid_PG.flatten()
    if clipped is None or not math.isfinite(ratio.bounds.high):
        return {}
    own_SC = gradient.batch.sequences.own_SC.bool()
    first_C = torch.arange(own_SC.shape[1], device=own_SC.device) == 0  # where whole completions are noted
    counted = valid_S[:, None] & (own_SC if ratio.by_token else first_C)
    positive_S1, total_S = gradient.advantages_PG.flatten()[:, None] > 0, counted.sum(1)
    low_S, high_S = ((which & counted).sum(1).double() for which in (clipped & ~positive_S1, clipped & positive_S1))
    low, high = (float(each_S.sum() / total_S.sum()) for each_S in (low_S, high_S))
    if not math.isfinite(ratio.bounds.low):
        return {"cispo_clip_ratio": high}
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/low_min": float((low_S / total_S.clamp(min=1)).min()),
        "clip_ratio/high_mean": high,
        "clip_ratio/high_max": float((high_S / total_S.clamp(min=1)).max()),
        "clip_ratio/region_mean": low + high,
    }
