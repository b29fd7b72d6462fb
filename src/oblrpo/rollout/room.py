"""The memory that sampling from the policy takes, found on small trials of it, and how many rows a room holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oblrpo.memory import WithoutProducts, peak_bytes
from oblrpo.policy import Policy
from oblrpo.rollout.decode import Draw
from oblrpo.rollout.transformers import draw_tokens

ROWS, TOKENS = (4, 8), (24, 48)  # of the trials; what a row and a token take is the slope between them
USED_SHARE = 0.85
"""The part of free memory that sampling may take: rows grow piece by piece, and pieces do not quite fit each other."""


@dataclass(frozen=True)
class SamplingMemory:
    """What sampling takes, in bytes."""

    constant: float  # whatever the rows, such as weights in the type of the arithmetic
    row: float  # of a row that is drawn for: its logits, in several types
    token: float  # of a token of such a row: keys and values, in all layers
    read: float  # of a token of a prompt while it is read, once for its group

    def of(self, groups: int, group_size: int, prompt: int, longest: int) -> int:
        """The peak of so many prompts with G outputs each, every one as long as it may be."""
        drawing = groups * group_size * (self.row + self.token * (prompt + longest))
        return int(self.constant + max(drawing, groups * prompt * self.read))

    def groups(self, room: float, group_size: int, prompt: int, longest: int) -> int:
        """The most prompts whose outputs may be sampled at once in a room."""
        of_one = self.of(1, group_size, prompt, longest) - self.constant
        return max(0, int((room - self.constant) / max(1.0, of_one)))


def sampling_memory(policy: Policy) -> SamplingMemory:
    """Measure sampling of a few short rows; no product is computed, and torch's random state is put back."""
    few, many = ROWS
    short, long = TOKENS
    with policy.seeded(0):
        start, longer, more = (_trial(policy, 1, *case) for case in ((few, short), (few, long), (many, short)))
        read = (_trial(policy, few, 1, long) - _trial(policy, few, 1, short)) / (few * (long - short))
    token = (longer - start) / (few * (long - short))
    row = (more - start) / (many - few) - token * short
    return SamplingMemory(start - few * (row + token * short), row, token, read)


def _trial(policy: Policy, prompts: int, copies: int, length: int) -> int:
    """Peak bytes of reading prompts and, where they have several copies, of two draws of each."""
    prompt_PQ = torch.randint(policy.vocabulary, (prompts, length), device=policy.device)
    mask_PQ = torch.ones_like(prompt_PQ)
    draw = Draw(1.0, features=True)

    @torch.no_grad()
    def sample() -> None:
        with WithoutProducts():
            draw_tokens(policy, prompt_PQ, mask_PQ, copies, min(copies, 2), draw, logps=True)

    return peak_bytes(sample, policy.device)


def even_blocks(count: int, most: int) -> int:
    """The size of the blocks of equal size, up to rounding, in which so many go by at most so many at a time."""
    return -(-count // -(-count // most))
