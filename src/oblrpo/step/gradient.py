"""The results of a gradient and of its update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.policy import Logps, Sequences
from oblrpo.step.batch import Batch

NO_SIGNAL = dict.fromkeys(("lr_factor", "snr", "n_snr", "signal2", "trace_cov"), 0.0)
"""The metrics of a step that has no signal, and so makes no update."""


@dataclass(frozen=True)
class Part:
    """The results of one micro-batch of whole groups; its share of the gradient is in `.grad`."""

    batch: Batch
    norm2_S: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    group_norm2_P: Tensor
    """Squared norm of each prompt's gradient g_i."""
    logps: Logps
    """The results of the forward, without a graph."""


def by_prompt(parts: list[Part], batch: Batch) -> Tensor:
    """The squared norm of the gradient of each prompt that takes part; 0 of those that are in no micro-batch."""
    norm2_P = torch.zeros_like(batch.part_P, dtype=parts[0].group_norm2_P.dtype)
    norm2_P[torch.cat([part.batch.index_P for part in parts])] = torch.cat([part.group_norm2_P for part in parts])
    return norm2_P[batch.part_P]


def own_norm2_of(gradient: Gradient) -> float | None:
    """The mean over prompts of the squared norm of a prompt's own mean gradient; None where norms were not taken."""
    if gradient.norm2_PG is None:
        return None
    batch, part_P = gradient.batch, gradient.batch.part_P
    share_PG = batch.prompts_in_mean * replace(batch, rho_PG=gradient.rho_PG).share_of_mean
    coef_PG = torch.where(share_PG == 0, 0, share_PG * (batch.rewards_PG - gradient.baseline_PG))
    part2_PG = torch.where(coef_PG == 0, 0, coef_PG.square() * gradient.norm2_PG)[part_P]
    return estimators.own_norm2(gradient.group_norm2_P, part2_PG, batch.valid_PG[part_P])


def by_output(parts: Sequence[Part], values: list[Tensor], rest_PG: Tensor) -> Tensor:
    """What each micro-batch says of its outputs, (P, G); of outputs that are in none, what `rest_PG` says."""
    result_S = rest_PG.to(values[0]).flatten().clone()
    result_S[torch.cat([part.batch.index_S for part in parts])] = torch.cat([value.flatten() for value in values])
    return result_S.view_as(rest_PG)


def by_token(sequences: Sequences, blocks: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """What blocks of rows say of their tokens, (S, C): 0 where there is none of the policy's own, NaN in other rows."""
    own_SC = sequences.own_SC.bool()
    result_SC = torch.where(own_SC, math.nan, values[0].new_zeros(()))
    for index_S, value_SC in zip(blocks, values, strict=True):
        width = value_SC.shape[1]
        result_SC[index_S, :width] = torch.where(own_SC[index_S, :width], value_SC, 0.0)
    return result_SC


@dataclass(frozen=True)
class Gradient:
    """The gradient of one batch (left in `.grad`, as that of the loss -J) and all that was learned on the way."""

    batch: Batch
    """The batch that it was taken of."""
    moments: estimators.Moments
    """Signal and noise."""
    norm2: float
    """The squared norm || g ||^2 of the batch gradient, before any clipping."""
    group_norm2_P: Tensor
    """That of the gradient g_i of each prompt that takes part."""
    norm2_PG: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    """The baseline b."""
    rho_PG: Tensor
    """The importance weights of whole outputs."""
    logps_PG: Tensor
    """The log-probability log pi(o|q) of every output, in nats; NaN of those that did not go through the model."""
    logp_SC: Tensor
    """The same of every token; 0 where there is none of the policy's own."""
    entropy_sum: float
    """The sum of the entropies of the policy's own tokens, in nats."""
    parts: Sequence[Part] = ()
    """The micro-batches that it was taken in, until the update has been made."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        parts: list[Part],
        moments: estimators.Moments,
        norm2: float,
        group_norm2_P: Tensor,
        known_PG: Tensor | None = None,
    ) -> Gradient:
        """The gradient that these micro-batches add up to.

        Args:
            batch: the whole batch.
            parts: what went through the model.
            moments: signal and noise.
            norm2: the squared norm of the gradient.
            group_norm2_P: those of the gradients of the prompts that take part.
            known_PG: the baseline, where no forward was needed to know it; not None if some outputs are in no part.
        """
        norms = [part.norm2_S for part in parts if part.norm2_S is not None]
        unknown_PG = torch.full_like(batch.rewards_PG, math.nan)
        logps_PG = by_output(parts, [part.logps.logps_S for part in parts], unknown_PG)
        places = [part.batch.index_S for part in parts]
        return cls(
            batch,
            moments,
            norm2,
            group_norm2_P,
            norm2_PG=by_output(parts, norms, unknown_PG).to(batch.rewards_PG) if norms else None,
            baseline_PG=by_output(
                parts, [part.baseline_PG for part in parts], unknown_PG if known_PG is None else known_PG
            ),
            rho_PG=by_output(parts, [part.batch.rho_PG for part in parts], batch.rho_PG),
            logps_PG=logps_PG.to(batch.rewards_PG),
            logp_SC=by_token(batch.sequences, places, [part.logps.logp_SC for part in parts]),
            entropy_sum=sum(part.logps.entropy for part in parts),
            parts=parts,
        )

    @property
    def ess_ratio(self) -> float:
        """The effective sample size over the batch's, (sum rho)^2 / (B sum rho^2), estimated from what is kept.

        It is 1 where all rho are 0: such a batch has no gradient.
        """
        batch = self.batch
        counted_PG = batch.valid_PG & (batch.keep_PG > 0)
        count_N, rho_N = batch.keep_PG[counted_PG].double(), self.rho_PG[counted_PG].double()
        if not rho_N.any():
            return 1.0
        return float((count_N @ rho_N) ** 2 / (count_N.sum() * (count_N @ rho_N.square())))

    @property
    def entropy(self) -> float:
        """The mean entropy of the policy's own tokens, in nats."""
        return self.entropy_sum / float(self.batch.sequences.own_ST.sum())

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
    target_kl: float = math.nan
    """The KL that the schedule meant the update to take; NaN where it has no such aim."""
    further: dict[str, float] = field(default_factory=dict)
    """Metrics of some steps: the variance ledger, how well proxies agree with exact norms, the sampler's mismatch."""
