"""What a sampler is, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from oblrpo.policy import Policy, Sequences
from oblrpo.scores import Features
from oblrpo.tasks import Problem
from oblrpo.tasks.episode import Episode


@dataclass(frozen=True)
class Rollouts:
    """Completions of P prompts, G of each; row p G + j is output j of prompt p."""

    sequences: Sequences
    """The prompts and completions as tokens."""
    completions: list[str]
    """The completions as text."""
    clipped_S: Tensor
    """Whether each completion was cut at the longest length."""
    sampler_logps_SC: Tensor | None = None
    """Log-probability of each token, in nats, under the distribution it was drawn from; values at padding mean nothing.
    It is None if the sampler gives none."""
    features: Features | None = None
    """What the draws tell of each completion, under the distributions that its tokens were drawn from; None if the
    sampler gives none."""
    episodes: list[Episode] | None = None
    """The completions as messages, where the policy took turns with tools."""

    @property
    def said(self) -> Sequence[str | Episode]:
        """The completions as rewards take them."""
        return self.completions if self.episodes is None else self.episodes

    def ids(self) -> list[list[int]]:
        """The policy's own tokens of every completion, special ones and the end token among them."""
        kept = zip(self.sequences.completion_SC.cpu(), self.sequences.own_SC.cpu(), strict=True)
        return [row[own.bool()].tolist() for row, own in kept]

    def at(self, index_S: Tensor) -> Rollouts:
        """The rows that an index names, in its order."""
        sequences, token_logps_SC = self.sequences.at(index_S), self.sampler_logps_SC
        return Rollouts(
            sequences,
            [self.completions[row] for row in index_S.tolist()],
            self.clipped_S[index_S],
            None if token_logps_SC is None else token_logps_SC[index_S, : sequences.own_SC.shape[1]],
            None if self.features is None else self.features.at(index_S),
            None if self.episodes is None else [self.episodes[row] for row in index_S.tolist()],
        )


def join(blocks: Sequence[Rollouts]) -> Rollouts:
    """The rows of several rollouts of one sampler, in their order."""
    sequences = Sequences.join([block.sequences for block in blocks])
    width = sequences.own_SC.shape[1]
    logps = [block.sampler_logps_SC for block in blocks if block.sampler_logps_SC is not None]
    features = [block.features for block in blocks if block.features is not None]
    return Rollouts(
        sequences,
        [text for block in blocks for text in block.completions],
        torch.cat([block.clipped_S for block in blocks]),
        torch.cat([pad(token_logps_SC, (0, width - token_logps_SC.shape[1])) for token_logps_SC in logps])
        if logps
        else None,
        Features.join(features) if features else None,
        [each for block in blocks for each in block.episodes or ()] or None,
    )


class Turn(NamedTuple):
    """The tokens that a policy has drawn until its turn ended, the end token included, and the figures of the draws."""

    ids: list[int]
    figures_KC: Tensor
    """Log-probability of each token; and where the sampler was asked for them entropy and `logit_norm2`."""


class Turns(Protocol):
    """Draws one turn of a conversation after another, and keeps what was read of it where it can."""

    def draw(self, rows: Sequence[int], contexts: Sequence[list[int]], rooms: Sequence[int]) -> list[Turn]:
        """Return the next turn of some rows.

        Args:
            rows: their numbers, by which they are known from one call to the next.
            contexts: all tokens so far of each row, which continue those of its last turn.
            rooms: the most tokens of each turn.
        """
        ...

    def end(self, row: int) -> None:
        """Forget a row, which takes no further turn."""
        ...


class TurnSampler(Protocol):
    """Draws turns of conversations, likewise."""

    def turns(self, temperature: float) -> Turns:
        """Return what draws the turns of new conversations."""
        ...

    def sync(self, policy: Policy) -> None:
        """Sample from these weights from now on."""
        ...


class Sampler(Protocol):
    """Draws completions from softmax(logits / temperature) of a policy, with no truncation of the distribution."""

    def sample(
        self, prompts: Sequence[Any], num_generations: int, max_completion_length: int, temperature: float
    ) -> Rollouts:
        """Return `num_generations` completions of every prompt, drawn by torch's global random state.

        Of an `EpisodeSampler` the prompts are problems, whose rows an environment is reset with.
        """
        ...

    def sync(self, policy: Policy) -> None:
        """Sample from these weights from now on; to be called after every change of the policy."""
        ...


def sample_problems(
    sampler: Sampler, problems: Sequence[Problem], num_generations: int, max_completion_length: int, temperature: float
) -> Rollouts:
    """Return completions of problems, whose whole rows an environment is given, and other samplers the prompts."""
    whole = getattr(sampler, "takes_problems", False)
    given: Any = problems if whole else [problem.prompt for problem in problems]
    return sampler.sample(given, num_generations, max_completion_length, temperature)


def texts_of(policy: Policy, completion_SC: Tensor, mask_SC: Tensor) -> list[str]:
    """Return the completions as text, without special tokens."""
    return [
        policy.tokenizer.decode(row[kept.bool()], skip_special_tokens=True)
        for row, kept in zip(completion_SC.cpu(), mask_SC.cpu(), strict=True)
    ]


def in_groups(contexts: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Return G equal contexts in a row as one, with G, where all come in such groups; else all of them, and 1."""
    runs = [len(list(run)) for _, run in groupby(contexts)]
    size = math.gcd(*runs)
    return [list(context) for context in contexts[::size]], size


def ended(policy: Policy, completion_SC: Tensor) -> Tensor:
    """Return whether each token is one that ends a completion."""
    return torch.isin(completion_SC, torch.tensor(policy.end_tokens, device=completion_SC.device))
