"""The batch that one gradient is taken of: completions, rewards, which of them count, and how each enters the mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.algorithms import Algorithm
from oblrpo.estimators import NORMALISATIONS, WEIGHTINGS
from oblrpo.policy import Logps, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of

if TYPE_CHECKING:
    from typing_extensions import Self


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
    count_PG: Tensor
    """G_i, the number of outputs that count, for each output of prompt i."""
    prompts_in_mean: int
    """P', the number of prompts that take part; of a part those of the whole batch."""
    keep_PG: Tensor
    """How many times each output counts; 0 where it does not go through the model."""
    rho_PG: Tensor
    """Importance weights of whole outputs, 1 on-policy."""
    index_P: Tensor
    """The prompts of the whole batch that these are."""
    index_S: Tensor
    """The outputs of the whole batch that these are, which may be some of a prompt's."""
    groups: int | list[int]
    """How many outputs of each prompt there are; where that differs, rewards are S x 1, a row for each output."""
    baseline_PG: Tensor | None = None
    """The baseline, where it is held from before; None where it is yet to be taken."""
    proxy_PG: Tensor | None = None
    """Squared score norms by a proxy, where the draws have told them before any forward."""

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        rewards_PG: Tensor,
        valid_PG: Tensor | None = None,
        algorithm: Algorithm = Algorithm("none"),  # noqa: B008  (frozen)
        *,
        longest: int = 1,
        **further: Any,
    ) -> Self:
        """Return a batch, of which prompts with fewer valid outputs than the algorithm compares take no part.

        Args:
            sequences: the completions.
            rewards_PG: the rewards F; what stands in the place of an output that is not valid is ignored, NaN too.
            valid_PG: which outputs have a reward; all if None.
            algorithm: the algorithm whose normalisation and loss weighting apply.
            longest: the longest completion allowed, in tokens.
            **further: fields of a subclass.
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
            keep_PG=torch.ones_like(rewards_PG),
            rho_PG=torch.ones_like(rewards_PG),
            index_P=torch.arange(P, device=rewards_PG.device),
            index_S=torch.arange(P * G, device=rewards_PG.device),
            groups=G,
            **further,
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
    def differs(self) -> bool:
        """Whether any reward that counts differs from another."""
        return estimators.differ(self.rewards_PG, self.valid_PG)

    @property
    def headroom(self) -> float:
        """The least nats an output that could earn all that is left to earn."""
        return estimators.headroom(self.rewards_PG, self.valid_PG)

    @property
    def own_PGT(self) -> Tensor:
        """The policy's own tokens, by prompt and output."""
        return self.sequences.own_SC.view(*self.shape, -1)

    @property
    def is_fresh(self) -> bool:
        """Whether no update was made on these outputs before; their gradient is then independent of all updates."""
        return True

    @property
    def mean_length(self) -> float:
        """The mean length of the outputs that count, in tokens."""
        lengths_PG = self.sequences.lengths_S.view(self.shape)
        return float(lengths_PG[self.valid_PG].double().mean())

    @property
    def share_of_mean(self) -> Tensor:
        """The factor of each output's F - b in the gradient of -J, (P, G): -rho keep weight / divisor / (P' G_i)."""
        coef_PG = -self.rho_PG * (self.weight_PG / self.divisor_PG) * self.keep_PG  # minus: optimizers descend
        return torch.where(self.valid_PG, coef_PG / max(self.prompts_in_mean, 1) / self.count_PG.clamp(min=1), 0)

    def under(self, logps: Logps) -> Self:
        """The same outputs with their importance weights under the policy that gave these log-probabilities: 1."""
        return self

    def scored(self, logp_SC: Tensor) -> Tensor:
        """What the score of each output is the gradient of, (S,): log pi(o|q), the sum over the policy's own tokens."""
        return (logp_SC * self.sequences.own_SC).sum(1)

    @property
    def owner_S(self) -> Tensor:
        """Which of the prompts here each output answers."""
        P = len(self.index_P)
        counts = torch.tensor([self.groups] * P if isinstance(self.groups, int) else self.groups, device="cpu")
        return torch.arange(P, device="cpu").repeat_interleave(counts).to(self.index_S.device)

    def parts(self, micro_batches: MicroBatches, chosen_PG: Tensor | None = None) -> Iterator[Self]:
        """The outputs that are kept, or that a mask chooses, in micro-batches; of a prompt all of them in one.

        In each of them prompts with more outputs come first.
        """
        chosen_PG = self.keep_PG > 0 if chosen_PG is None else chosen_PG
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

    def at(self, rows_S: Tensor) -> Self:
        """Some of the outputs, in any order in which those of a prompt are neighbours; it need not be all of them."""
        place_P, count_P = self.owner_S[rows_S].unique_consecutive(return_counts=True)
        return self._of(rows_S, count_P.tolist(), self.index_P[place_P], self.index_S[rows_S])

    def _of(self, rows_S: Tensor, counts: list[int], index_P: Tensor, index_S: Tensor) -> Self:
        equal = len(set(counts)) == 1
        shape = (len(counts) if equal else len(rows_S), -1)
        rows = {
            field.name: values.flatten()[rows_S].view(shape) if field.name.endswith("_PG") else values[rows_S]
            for field in fields(self)
            if field.name.endswith(("_PG", "_SC")) and (values := getattr(self, field.name)) is not None
        }
        groups, sequences = counts[0] if equal else counts, self.sequences.at(rows_S)
        return replace(self, sequences=sequences, index_P=index_P, index_S=index_S, groups=groups, **rows)
