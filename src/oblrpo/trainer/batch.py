"""The batch that one gradient is taken of: completions, rewards, which of them count, and how each enters the mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblrpo.algorithms import Algorithm
from oblrpo.estimators import NORMALISATIONS, RATIOS, WEIGHTINGS, Ratio
from oblrpo.policy import Logps, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of
from oblrpo.scores import Features
from oblrpo.trainer.sampler_mismatch import SamplerMismatch


@dataclass(frozen=True)
class Draw:
    """The draw of the outputs that go through the model, for whoever asks what it cost."""

    chance_PG: Tensor
    """The chances that outputs were kept with in one draw."""
    nothing: float
    """The chance that one draw keeps nothing, and is made again."""
    coef_PG: Tensor
    """What would have multiplied each score in the gradient if all had been kept, a_j."""
    added: float
    """What leaving out adds to the variance, by what was known beforehand, over sum_j a_j^2 w_j."""


@dataclass(frozen=True)
class Batch:
    """P prompts with G outputs each, of which some may not count; all of a step, or the part of some prompts.

    The gradient is g = (1/P') sum_i g_i over the P' prompts that take part, with g_i = (1/G_i) sum_j over the G_i
    outputs of prompt i that count. Row p G + j of everything with an axis S is output j of prompt p.
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
    rho_PG: Tensor
    """Weights of whole completions: the `ratio`, or the truncated pi / sampler; 1 until `weighed`, and on-policy."""
    ratio: Ratio = RATIOS["sequence"]
    """What weighs scores in later updates on the batch."""
    sampler_logps_SC: Tensor | None = None
    """The log-probability of each token under the sampler, where it is known."""
    clip_max: float | None = None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    old_logp_SC: Tensor | None = None
    """The log-probability of each token before the first update on the batch; None until there is one."""
    old_baseline_PG: Tensor | None = None
    """The baseline of the first update; None until there is one."""
    token_weight_SC: Tensor | None = None
    """The weights of tokens' scores, where the `ratio` is one by token; None on-policy, and until `weighed`."""
    clipped: Tensor | None = None
    """Which tokens, (S, C), or completions, (S, 1), the `ratio` has clipped; None on-policy, and until `weighed`."""
    mismatch: SamplerMismatch | None = None
    """The distance of the policy from the sampler, where `weighed` could measure it."""
    features: Features | None = None
    """What the draws themselves tell of each output, where the sampler does."""
    keep_PG: Tensor | None = None
    """How many times each output counts, 0 where it does not go through the model; None until that is chosen."""
    draw: Draw | None = None
    """How outputs of the whole batch were drawn; None where none are."""
    whole: Batch | None = None
    """The batch that this is a part of; None where it is the whole."""
    index_P: Tensor | None = None
    """The prompts of `whole` that are in this part; None where it is the whole."""
    index_S: Tensor | None = None
    """The outputs of `whole` that are in this part, which may be some of a prompt's; None where it is the whole."""
    count_P: Tensor | None = None
    """How many outputs of each prompt are in this part, where they differ: it is S x 1 then, a row for each output."""

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        rewards_PG: Tensor,
        valid_PG: Tensor | None = None,
        algorithm: Algorithm = Algorithm("none"),  # noqa: B008  (frozen)
        *,
        longest: int = 1,
        sampler_logps_SC: Tensor | None = None,
        clip_max: float | None = None,
        features: Features | None = None,
        ratio: Ratio = RATIOS["sequence"],
    ) -> Batch:
        """Return a batch, of which prompts with fewer valid outputs than the algorithm compares take no part.

        Args:
            sequences: the completions.
            rewards_PG: the rewards F; what stands in the place of an output that is not valid is ignored, NaN too.
            valid_PG: which outputs have a reward; all if None.
            algorithm: the algorithm whose normalisation and loss weighting apply.
            longest: the longest completion allowed, in tokens.
            sampler_logps_SC: the log-probabilities that the sampler reports, if its mismatch is to be measured.
            clip_max: the C of the weights that correct for it.
            features: what the draws themselves tell of each output.
            ratio: what weighs scores in later updates on the batch.

        Raises:
            ValueError: valid_PG has another shape than the rewards.
        """
        if valid_PG is None:
            valid_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
        if valid_PG.shape != rewards_PG.shape:
            raise ValueError(f"valid_PG has shape {tuple(valid_PG.shape)}, rewards_PG {tuple(rewards_PG.shape)}.")
        valid_PG = valid_PG.bool() & (valid_PG.sum(1, keepdim=True) >= algorithm.smallest_group)
        rewards_PG = torch.where(valid_PG, rewards_PG, 0)
        lengths_PG = sequences.lengths_S.view_as(rewards_PG).to(rewards_PG)
        weight_PG = WEIGHTINGS[algorithm.weighting](lengths_PG, longest, valid_PG)
        return cls(
            sequences,
            rewards_PG,
            valid_PG,
            divisor_PG=NORMALISATIONS[algorithm.normalisation](rewards_PG, valid_PG),
            weight_PG=weight_PG,
            rho_PG=torch.ones_like(rewards_PG),
            sampler_logps_SC=sampler_logps_SC,
            clip_max=clip_max,
            features=features,
            ratio=ratio,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers P and G, counting outputs that do not count and prompts that take no part, too."""
        P, G = self.rewards_PG.shape
        return P, G

    @property
    def part_P(self) -> Tensor:
        """Which prompts take part."""
        return self.valid_PG.any(1)

    @property
    def prompts_in_mean(self) -> int:
        """The number P' of prompts of the whole batch that take part."""
        return int((self.whole or self).part_P.sum())

    @property
    def own_PGT(self) -> Tensor:
        """The policy's own tokens, by prompt and output."""
        return self.sequences.own_SC.view(*self.shape, -1)

    @property
    def mean_length(self) -> float:
        """The mean length of the outputs that count, in tokens."""
        lengths_PG = self.sequences.lengths_S.view(self.shape)
        return float(lengths_PG[self.valid_PG].double().mean())

    @property
    def ess_ratio(self) -> float:
        """The effective sample size over the batch's, (sum rho)^2 / (B sum rho^2), estimated from what is kept.

        It is 1 where all rho are 0: such a batch has no gradient.
        """
        counted_PG = self.valid_PG & self.kept_PG
        count_N = torch.ones_like(self.rewards_PG) if self.keep_PG is None else self.keep_PG
        count_N, rho_N = count_N[counted_PG].double(), self.rho_PG[counted_PG].double()
        if not rho_N.any():
            return 1.0
        return float((count_N @ rho_N) ** 2 / (count_N.sum() * (count_N @ rho_N.square())))

    def share_of_mean(self) -> Tensor:
        """The factor of each output's F - b in the gradient of -J, (P, G): -rho weight / divisor / (P' G_i)."""
        coef_PG = -self.rho_PG * (self.weight_PG / self.divisor_PG)  # minus: optimizers descend
        coef_PG = coef_PG if self.keep_PG is None else coef_PG * self.keep_PG
        counted_PG = (self.whole or self).valid_PG
        outputs_PG = counted_PG.sum(1, keepdim=True).clamp(min=1).expand_as(counted_PG)
        if self.index_S is not None:
            outputs_PG = outputs_PG.flatten()[self.index_S].view(self.shape)
        return torch.where(self.valid_PG, coef_PG / max(self.prompts_in_mean, 1) / outputs_PG, 0)

    @property
    def kept_PG(self) -> Tensor:
        """Which outputs go through the model."""
        return torch.ones_like(self.valid_PG) if self.keep_PG is None else self.keep_PG > 0

    def parts(self, micro_batches: MicroBatches, chosen_PG: Tensor | None = None) -> Iterator[Batch]:
        """The outputs that are kept, or that a mask chooses, in micro-batches; of a prompt all of them in one.

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
            yield self._part(part_P, rows_S[chosen_PG.flatten()[rows_S]], count_P[part_P])

    @property
    def groups(self) -> int | list[int]:
        """How many outputs of each prompt are in this part: the number, or numbers where they differ."""
        return self.shape[1] if self.count_P is None else [int(count) for count in self.count_P]

    def _part(self, index_P: Tensor, index_S: Tensor, count_P: Tensor) -> Batch:
        equal = bool((count_P == count_P[0]).all())

        def of(values_PG: Tensor) -> Tensor:
            return values_PG.flatten()[index_S].view(len(index_P) if equal else len(index_S), -1)

        return replace(
            self,
            sequences=self.sequences.at(index_S),
            rewards_PG=of(self.rewards_PG),
            valid_PG=of(self.valid_PG),
            divisor_PG=of(self.divisor_PG.expand_as(self.rewards_PG)),
            weight_PG=of(self.weight_PG),
            rho_PG=of(self.rho_PG),
            sampler_logps_SC=None if self.sampler_logps_SC is None else self.sampler_logps_SC[index_S],
            old_logp_SC=None if self.old_logp_SC is None else self.old_logp_SC[index_S],
            old_baseline_PG=None if self.old_baseline_PG is None else of(self.old_baseline_PG),
            keep_PG=None if self.keep_PG is None else of(self.keep_PG),
            whole=self,
            index_P=index_P,
            index_S=index_S,
            count_P=None if equal else count_P,
        )

    def weighed(self, logps: Logps) -> Batch:
        """The same outputs with their weights under the policy that gave these log-probabilities.

        They are the `ratio` of this policy to the old one, 1 in the first update on a batch. With a sampler that
        reports its log-probabilities, and unless its correction is off, they are multiplied by min(C, old / sampler);
        a ratio that is the importance weight itself becomes min(C, pi / sampler).

        Raises:
            ValueError: what the sampler reports is no log-probability.
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

    def aged(self, logp_SC: Tensor, baseline_PG: Tensor) -> Batch:
        """The same for later updates: this is what the old policy was, and what its completions were compared with."""
        return replace(self, old_logp_SC=logp_SC, old_baseline_PG=baseline_PG, rho_PG=torch.ones_like(self.rho_PG))

    def _against(self, old_SC: Tensor, logp_SC: Tensor) -> Batch:
        """The same with the `ratio` of a policy to the old one."""
        assert self.old_baseline_PG is not None
        advantages_S = (self.rewards_PG - self.old_baseline_PG).flatten()
        weights = self.ratio(logp_SC, old_SC, self.sequences.own_SC, advantages_S)
        if self.ratio.by_token:
            return replace(self, token_weight_SC=weights.weight, clipped=weights.clipped)
        return replace(self, rho_PG=weights.weight.view(self.shape).to(self.rewards_PG), clipped=weights.clipped)

    def scored(self, logp_SC: Tensor) -> Tensor:
        """What the gradient of each output is taken of, (S,): sum_t m_t log pi(o_t) with the tokens' weights, or 1."""
        weighed_SC = logp_SC if self.token_weight_SC is None else logp_SC * self.token_weight_SC
        return (weighed_SC * self.sequences.own_SC).sum(1)


def mismatch_metrics(parts: list[Batch]) -> dict[str, float]:
    """The mismatch of a batch's parts as metrics; nothing where the sampler reports no log-probabilities."""
    found = [part.mismatch for part in parts if part.mismatch is not None]
    return SamplerMismatch.join(found).metrics(parts[0].clip_max) if found else {}
