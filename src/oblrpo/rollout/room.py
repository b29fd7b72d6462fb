"""The memory that sampling from the policy takes, found on small trials of it, and how many rows a room holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from oblrpo.errors import InputError
from oblrpo.memory import WithoutProducts, peak_bytes
from oblrpo.policy import Policy
from oblrpo.rollout.decode import Draw
from oblrpo.rollout.transformers import draw_tokens

ROWS, TOKENS = (16, 32), (24, 48)  # of the trials; so many rows take more than reading their one prompt does
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


def sampling_memory(policy: Policy, several_turns: bool = False) -> SamplingMemory:
    """Measure sampling of a few short rows; no product is computed, and torch's random state is put back.

    With several turns keys and values count twice: those that are kept of a turn, and those of the next.
    """
    few, many = ROWS
    short, long = TOKENS
    with policy.seeded(0):
        start, longer, more = (_trial(policy, 1, *case) for case in ((few, short), (few, long), (many, short)))
        read = (_trial(policy, few, 1, long) - _trial(policy, few, 1, short)) / (few * (long - short))
    token = (longer - start) / (few * (long - short))
    row = (more - start) / (many - few) - token * short
    return SamplingMemory(start - few * (row + token * short), row, token * (1 + several_turns), read)


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


def rows_at_once(
    sampling: SamplingMemory, room: float, prompts: int, asked: Mapping[str, int], prompt: int, longest: int,
    instead: str = "",
) -> int:  # fmt: skip
    """The rows that are sampled at once: those of all prompts, or of blocks of equal size, whose peak fits the room.

    Args:
        sampling: what they take.
        room: bytes.
        prompts: the prompts that are asked for together.
        asked: how many outputs a prompt has, by the setting that says so; the first with all prompts.
        prompt: the tokens of the longest prompt.
        longest: those of the longest output.
        instead: what else would help where there is no room for one prompt, in words.

    Raises:
        InputError: not even one prompt's outputs fit.
    """
    for name, count in asked.items():
        if (needed := sampling.of(1, count, prompt, longest)) > room:
            raise InputError(
                f"a prompt's {count} completions ({name}) of up to {longest:,} tokens take {needed / 1e9:.2g} GB while "
                f"they are sampled, and {max(0, room) / 1e9:.2g} GB are free for it: lower {name} or "
                f"max_completion_length{instead}; or set max_num_seqs to {count}, if hardly any gets that long."
            )
    group, most = next(iter(asked.values())), max(asked.values())
    fits = max(1, min(prompts, sampling.groups(USED_SHARE * room, group, prompt, longest)))
    return max(-(-prompts // -(-prompts // fits)) * group, most)
