"""The results of a step's gradient and update, for whoever reports them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.policy import Logps, Sequences
from oblrpo.policy.micro_batches import rows_of
from oblrpo.rollout import Rollouts, join
from oblrpo.trainer.batch import Batch


@dataclass(frozen=True)
class Part:
    """The results of one micro-batch of whole groups; its share of the gradient is in `.grad`."""

    batch: Batch
    norm2_S: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    """The baseline b."""
    group_norm2_P: Tensor
    """Squared norm of each prompt's gradient g_i."""
    logps: Logps
    """The results of the forward, without a graph."""
    entropy: float
    """The sum of the entropies of the policy's own tokens, in nats."""


def by_prompt(parts: list[Part], values: list[Tensor], rest_P: Tensor) -> Tensor:
    """What each micro-batch says of its prompts, (P,); of prompts that are in none, what `rest_P` says."""
    index_P = torch.cat([part.batch.index_P for part in parts if part.batch.index_P is not None])
    result_P = rest_P.to(values[0]).clone()
    result_P[index_P] = torch.cat(values)
    return result_P


def by_output(parts: list[Part], values: list[Tensor], rest_PG: Tensor) -> Tensor:
    """What each micro-batch says of its outputs, (P, G); of outputs that are in none, what `rest_PG` says."""
    index_S = torch.cat([part.batch.index_S for part in parts if part.batch.index_S is not None])
    result_S = rest_PG.to(values[0]).flatten().clone()
    result_S[index_S] = torch.cat([each.flatten() for each in values])
    return result_S.view_as(rest_PG)


def clip_metrics(parts: list[Part]) -> dict[str, float]:
    """The shares of tokens, or of completions, that a ratio has clipped, by TRL's keys; nothing where it did not bound.

    `clip_ratio/low_*` are of outputs with negative advantages, `clip_ratio/high_*` of the others, over all outputs.
    """
    shares: dict[str, list[Tensor]] = {"low": [], "high": [], "low_S": [], "high_S": []}
    total = 0.0
    for part in parts:
        clipped, ratio = part.batch.clipped, part.batch.ratio
        if clipped is None or not math.isfinite(ratio.bounds.high):
            return {}
        counted_S1 = part.batch.valid_PG.flatten()[:, None]
        counted = counted_S1 & (part.batch.sequences.own_SC.bool() if ratio.by_token else torch.ones_like(clipped))
        positive_S1 = (part.batch.rewards_PG - part.baseline_PG).flatten()[:, None] > 0
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


def by_token(sequences: Sequences, blocks: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """What blocks of rows say of their tokens, (S, C): 0 where there is none of the policy's own, NaN in other rows."""
    own_SC = sequences.own_SC.bool()
    result_SC = torch.where(own_SC, math.nan, values[0].new_zeros(()))
    for index_S, each in zip(blocks, values, strict=True):
        width = each.shape[1]
        result_SC[index_S, :width] = torch.where(own_SC[index_S, :width], each, 0.0)
    return result_SC


@dataclass(frozen=True)
class Gradient:
    """The gradient of one batch (left in `.grad`, as that of the loss -J) and all that was learned on the way."""

    batch: Batch
    """The batch that it was taken of, with importance weights."""
    norm2_PG: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    """The baseline b."""
    logps_PG: Tensor
    """The log-probability log pi(o|q) of every output, in nats; NaN of those that did not go through the model."""
    logp_SC: Tensor
    """The same of every token; 0 where there is none of the policy's own."""
    moments: estimators.Moments
    """Signal and noise."""
    norm2: float
    """The squared norm || g ||^2 of the batch gradient, before any clipping."""
    group_norm2_P: Tensor
    """That of the gradient g_i of each prompt that takes part."""
    entropy: float
    """The mean entropy of the policy's own tokens, in nats."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        parts: list[Part],
        moments: estimators.Moments,
        norm2: float,
        group_norm2_P: Tensor,
        baseline_PG: Tensor | None,
        entropy: float,
    ) -> Gradient:
        """Return the gradient that these micro-batches add up to.

        Args:
            batch: the whole batch.
            parts: what went through the model.
            moments: signal and noise.
            norm2: the squared norm of the gradient.
            group_norm2_P: those of the gradients of the prompts that take part.
            baseline_PG: the baseline, where no forward is needed to know it; not None if some outputs are in no part.
            entropy: the sum of the entropies of the tokens of outputs that are in no part.
        """
        norms = [part.norm2_S for part in parts if part.norm2_S is not None]
        unknown_PG = torch.full_like(batch.rewards_PG, math.nan)
        rho_PG = by_output(parts, [part.batch.rho_PG for part in parts], batch.rho_PG)
        logps_PG = by_output(parts, [part.logps.logps_S for part in parts], unknown_PG)
        places = [part.batch.index_S for part in parts if part.batch.index_S is not None]
        known_PG = unknown_PG if baseline_PG is None else baseline_PG
        return cls(
            batch=replace(batch, rho_PG=rho_PG),
            norm2_PG=by_output(parts, norms, unknown_PG).to(batch.rewards_PG) if norms else None,
            baseline_PG=by_output(parts, [part.baseline_PG for part in parts], known_PG),
            logps_PG=logps_PG.to(batch.rewards_PG),
            logp_SC=by_token(batch.sequences, places, [part.logps.logp_SC for part in parts]),
            moments=moments,
            norm2=norm2,
            group_norm2_P=group_norm2_P,
            entropy=(entropy + sum(part.entropy for part in parts)) / float(batch.sequences.own_ST.sum()),
        )

    @property
    def trained(self) -> float:
        """The share of the outputs that went through the model; the coefficients of the others are 0."""
        return float(self.logps_PG.isfinite().double().mean())

    @property
    def advantages_PG(self) -> Tensor:
        """The advantages, (F - b) over the normalisation's divisor; 0 where an output does not count."""
        return (self.batch.rewards_PG - self.baseline_PG) / self.batch.divisor_PG


@dataclass(frozen=True)
class Update:
    """The outcome of one update."""

    gradient: Gradient
    factor: float
    """The factor on eta_0 that the update was really made with; 0 where there was no gradient."""
    learning_rate: float
    """The rate really used; 0 where there was no gradient, and so no update."""
    smoothed: estimators.Moments
    """Signal and noise, averaged over steps."""
    snr_interval: tuple[float, float]
    """95 % interval of the averaged signal-to-noise ratio."""
    kl: float | None
    """The KL divergence by which the update moved the policy, in nats, where it was measured."""
    further: dict[str, float] = field(default_factory=dict)
    """Metrics of some steps: the variance ledger, how well proxies agree with exact norms, the sampler's mismatch."""


@dataclass(frozen=True)
class Sampled:
    """Completions of P prompts, G of each, with their rewards."""

    rollouts: Rollouts
    rewards_PG: Tensor
    """The rewards F; the value of an output without a reward means nothing."""
    valid_PG: Tensor
    """Which outputs have a reward."""

    def at(self, index_P: Tensor) -> Sampled:
        """The completions of some of the prompts."""
        index_P = index_P.to(self.rewards_PG.device)
        rows_S = rows_of(index_P, self.rewards_PG.shape[1])
        return Sampled(self.rollouts.at(rows_S), self.rewards_PG[index_P], self.valid_PG[index_P])

    @classmethod
    def join(cls, blocks: Sequence[Sampled]) -> Sampled:
        """The completions of all the prompts of several blocks."""
        return cls(
            join([each.rollouts for each in blocks]),
            torch.cat([each.rewards_PG for each in blocks]),
            torch.cat([each.valid_PG for each in blocks]),
        )


@dataclass(frozen=True)
class Step:
    """One step of the algorithm: the completions, their rewards, and the updates on them."""

    rollouts: Rollouts
    rewards_PG: Tensor
    """The rewards F; the value of an output without a reward means nothing."""
    valid_PG: Tensor
    """Which outputs have a reward."""
    updates: list[Update]
    """The updates, of which there are none where too few outputs have a reward, or the gradient is not finite."""
    skipped: str = ""
    """What was not finite, so that an update was left out; empty if nothing was."""
    kl_PG: Tensor | None = None
    """The log-ratio log(pi / pi_ref) of every output that its reward was charged for; None without a reference."""
    sampled: Sampled | None = None
    """All that was sampled, where some of it was dropped before anything was learned of it."""
    rounds: int | None = None
    """How many times prompts were sampled for it, where that is not once by itself."""

    def of_rounds(self, sampled: Sampled, rounds: int) -> Step:
        """The step as one that some of these completions of several rounds were chosen for."""
        return replace(self, sampled=sampled, rounds=rounds)
