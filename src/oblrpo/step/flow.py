"""The records of a step: Samples -> Batch -> Part (with what its scores are Weighed by) -> Gradient -> Update.

`policy.Sequences` are tokens. Samples add the rewards F of P prompts with G outputs each; a batch adds how each F - b
enters the mean; a gradient is what its parts add up to, and an update is what was made of it. All of them are
read-only. Row p G + j of what has an axis S is output j of prompt p. A part takes its rows of every `_PG` field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.estimators import NORMALISATIONS, WEIGHTINGS, advantages
from oblrpo.policy import Logps, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of
from oblrpo.rollout import Rollouts, join
from oblrpo.tables.algorithms import Algorithm


@dataclass(frozen=True)
class Samples:
    """Completions of P prompts, G of each, with their rewards."""

    rollouts: Rollouts
    rewards_PG: Tensor
    """The rewards F; the value of an output without a reward means nothing."""
    valid_PG: Tensor
    """Which outputs have a reward."""

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
    """The outputs that one gradient is taken of, and how each enters the mean; all of a step, or a part of the prompts.

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
    count_PG: Tensor
    """G_i, the number of outputs that count, for each output of prompt i."""
    prompts_in_mean: int
    """P', the number of prompts that take part; in a part, those of the whole batch."""
    index_P: Tensor
    """The prompts of the whole batch that these are."""
    index_S: Tensor
    """The outputs of the whole batch that these are, which may be some of a prompt's."""
    groups: int | list[int]
    """How many outputs of each prompt there are; where that differs, rewards are S x 1, a row for each output."""
    baseline_PG: Tensor | None = None
    """The baseline, where an earlier pass has fixed it."""
    skipped_PG: Tensor | None = None
    """Which outputs do not go through the model, because their advantage is 0; None: all do."""
    fresh: bool = True
    """Whether no update was made on these outputs before; their gradient is then independent of all updates."""

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
        P, G = rewards_PG.shape
        valid_PG = valid_PG.bool() & (valid_PG.sum(1, keepdim=True) >= algorithm.smallest_group)
        rewards_PG = torch.where(valid_PG, rewards_PG, 0)
        lengths_PG = sequences.lengths_S.view_as(rewards_PG).to(rewards_PG)
        return cls(
            sequences,
            rewards_PG,
            valid_PG,
            divisor_PG=NORMALISATIONS[algorithm.normalisation](rewards_PG, valid_PG).expand_as(rewards_PG),
            weight_PG=WEIGHTINGS[algorithm.weighting](lengths_PG, longest, valid_PG),
            count_PG=valid_PG.sum(1, keepdim=True).expand_as(valid_PG),
            prompts_in_mean=int(valid_PG.any(1).sum()),
            index_P=torch.arange(P, device=rewards_PG.device),
            index_S=torch.arange(P * G, device=rewards_PG.device),
            groups=G,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """P and G, of all outputs, also those that do not count; (S, 1) in a part whose prompts have unlike numbers."""
        P, G = self.rewards_PG.shape
        return P, G

    @property
    def part_P(self) -> Tensor:
        """Which prompts take part."""
        return self.valid_PG.any(1)

    @property
    def kept_PG(self) -> Tensor:
        """Which outputs go through the model."""
        return torch.ones_like(self.valid_PG) if self.skipped_PG is None else ~self.skipped_PG

    @property
    def own_PGT(self) -> Tensor:
        """The policy's own tokens, by prompt and output."""
        return self.sequences.own_SC.view(*self.shape, -1)

    @property
    def mean_length(self) -> float:
        """The mean length of the outputs that count, in tokens."""
        return float(self.sequences.lengths_S.view(self.shape)[self.valid_PG].double().mean())

    def factor_PG(self, rho_PG: Tensor) -> Tensor:
        """The factor of each F - b in the gradient of -J: -rho weight / divisor / (P' G_i); optimizers descend."""
        factor_PG = -rho_PG * (self.weight_PG / self.divisor_PG) / max(self.prompts_in_mean, 1)
        return torch.where(self.valid_PG & self.kept_PG, factor_PG / self.count_PG.clamp(min=1), 0)

    @property
    def owner_S(self) -> Tensor:
        """Which of the prompts here each output answers."""
        P = len(self.index_P)
        counts = torch.tensor([self.groups] * P if isinstance(self.groups, int) else self.groups, device="cpu")
        return torch.arange(P, device="cpu").repeat_interleave(counts).to(self.index_S.device)

    def parts(self, micro_batches: MicroBatches, chosen_PG: Tensor | None = None) -> Iterator[Batch]:
        """The outputs that go through the model, or that a mask chooses, in micro-batches; of a prompt all in one.

        In each of them prompts with more outputs come first.
        """
        chosen_PG = self.kept_PG if chosen_PG is None else chosen_PG
        index_S, index_P = chosen_PG.flatten().nonzero().flatten(), chosen_PG.any(1).nonzero().flatten()
        if not len(index_P):
            return
        count_P = chosen_PG.sum(1)
        for place in micro_batches.of(self.sequences.at(index_S), self.shape[1], count_P[index_P]):
            part_P = index_P[place]
            part_P = part_P[count_P[part_P].argsort(descending=True, stable=True)]
            rows_S = rows_of(part_P, self.shape[1])
            rows_S, counts = rows_S[chosen_PG.flatten()[rows_S]], count_P[part_P].tolist()
            yield self._of(rows_S, counts, part_P, rows_S)

    def at(self, rows_S: Tensor) -> Batch:
        """Some of the outputs, in any order in which those of a prompt are neighbours; it need not be all of them."""
        place_P, count_P = self.owner_S[rows_S].unique_consecutive(return_counts=True)
        return self._of(rows_S, count_P.tolist(), self.index_P[place_P], self.index_S[rows_S])

    def _of(self, rows_S: Tensor, counts: list[int], index_P: Tensor, index_S: Tensor) -> Batch:
        equal = len(set(counts)) == 1
        shape = (len(counts) if equal else len(rows_S), -1)
        rows = {
            each.name: values_PG.flatten()[rows_S].view(shape)
            for each in fields(self)
            if each.name.endswith("_PG") and (values_PG := getattr(self, each.name)) is not None
        }
        groups, sequences = counts[0] if equal else counts, self.sequences.at(rows_S)
        return replace(self, sequences=sequences, index_P=index_P, index_S=index_S, groups=groups, **rows)


@dataclass(frozen=True)
class Weighed:
    """What the scores of a part are multiplied by, where its outputs come from another distribution than the policy."""

    rho_PG: Tensor
    """Importance weights of whole outputs."""
    token_weight_SC: Tensor | None = None
    """Weights of single tokens' scores, where the ratio is one by token."""
    clipped: Tensor | None = None
    """Which tokens, (S, C), or completions, (S, 1), the ratio has clipped; None in the first pass over a batch."""
    log_ratio_S: Tensor | None = None
    """log pi - log mu of each completion under the sampler mu, in nats and float64, where mu reports it."""
    difference_N: Tensor | None = None
    """The size of log pi - log mu of every token, in nats."""


Weigh = Callable[[Batch, Tensor], Weighed]
"""(part, log pi of its tokens) -> what its scores are multiplied by."""


def on_policy(part: Batch, token_logps_SC: Tensor) -> Weighed:
    """The weights 1, of outputs that the policy has sampled as it is."""
    return Weighed(torch.ones_like(part.rewards_PG))


@dataclass(frozen=True)
class Part:
    """The results of one micro-batch; its share of the gradient is in `.grad`."""

    batch: Batch
    weighed: Weighed
    norm2_S: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    group_norm2_P: Tensor
    """Squared norm of each prompt's gradient g_i."""
    logps: Logps
    """The results of the forward, without a graph."""


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
    """The squared norm of the gradient g_i of each prompt that takes part."""
    norm2_PG: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    """The baseline b."""
    rho_PG: Tensor
    """The importance weights of whole outputs."""
    logps_PG: Tensor
    """The log-probability log pi(o|q) of every output, in nats; NaN of those that did not go through the model."""
    token_logps_SC: Tensor
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
        blocks = [part.batch.index_S for part in parts]

        def by_output(name: str, rest_PG: Tensor) -> Tensor:
            values_S = torch.cat([attrgetter(name)(part).flatten() for part in parts])
            result_S = rest_PG.to(values_S).flatten().clone()
            result_S[torch.cat(blocks)] = values_S
            return result_S.view_as(rest_PG)

        unknown_PG, one_PG = torch.full_like(batch.rewards_PG, math.nan), torch.ones_like(batch.rewards_PG)
        has_norms = parts[0].norm2_S is not None
        return cls(
            batch,
            moments,
            norm2,
            group_norm2_P,
            norm2_PG=by_output("norm2_S", unknown_PG).to(batch.rewards_PG) if has_norms else None,
            baseline_PG=by_output("baseline_PG", unknown_PG if known_PG is None else known_PG),
            rho_PG=by_output("weighed.rho_PG", one_PG),
            logps_PG=by_output("logps.logps_S", unknown_PG).to(batch.rewards_PG),
            token_logps_SC=batch.sequences.by_token(blocks, [part.logps.token_logps_SC for part in parts]),
            entropy_sum=sum(part.logps.entropy for part in parts),
            parts=parts,
        )

    @property
    def ess_ratio(self) -> float:
        """The effective sample size over the batch's, (sum rho)^2 / (B sum rho^2); 1 where all rho are 0."""
        rho_N = self.rho_PG[self.batch.valid_PG & self.batch.kept_PG].double()
        one_N = torch.ones_like(rho_N)  # dot products: sums in another order would change the last bit of a rate
        return float((one_N @ rho_N) ** 2 / (len(rho_N) * (one_N @ rho_N.square()))) if rho_N.any() else 1.0

    @property
    def entropy(self) -> float:
        """The mean entropy of the policy's own tokens, in nats."""
        return self.entropy_sum / float(self.batch.sequences.own_ST.sum())

    @property
    def trained_share(self) -> float:
        """The share of the outputs that went through the model."""
        return float(self.logps_PG.isfinite().double().mean())

    @property
    def advantages_PG(self) -> Tensor:
        """The advantages F - b; 0 where an output does not count."""
        return advantages(self.batch.rewards_PG, self.baseline_PG, self.batch.valid_PG)


@dataclass(frozen=True)
class Update:
    """The outcome of one update."""

    gradient: Gradient
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
    further: dict[str, float] = field(default_factory=dict)
    """Metrics of some steps: the ledger, proxies beside exact norms, the sampler's mismatch, what was clipped."""
