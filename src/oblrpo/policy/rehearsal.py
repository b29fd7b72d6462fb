"""A pass over two short rows before anything is sampled: what the score tape cannot take is refused then."""

from __future__ import annotations

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.policy.model import Policy
from oblrpo.policy.sequences import Sequences
from oblrpo.scores import ScoreTape, UnsupportedModelError

PROMPT, COMPLETION = 2, 3
"""Tokens of each row's parts."""


def rehearse(policy: Policy, cure: str) -> None:
    """Take scores of two short rows and forget them; `cure` says how to adapt attention alone, if that would do."""
    ids_ST = two_rows(PROMPT + COMPLETION, policy.vocabulary).to(policy.device)
    ones_ST = torch.ones_like(ids_ST)
    rows = Sequences.of(ids_ST[:, :PROMPT], ones_ST[:, :PROMPT], ids_ST[:, PROMPT:], ones_ST[:, PROMPT:])
    try:
        with ScoreTape(policy.model, "streamed") as tape:
            tape.record(policy.logps(rows).logps_S)
    except UnsupportedModelError as error:
        cure = f" Adapters of attention are taken: {cure}." if "lora" in str(error).lower() else ""
        if "trainable_tokens" in str(error):
            cure = " Of a head that is tied to the embedding trainable_token_indices are not taken: leave them out."
        raise InputError(f"scores of this model cannot be taken: {error}{cure}") from None


def two_rows(length: int, vocabulary: int, shift: int = 0) -> Tensor:
    """The tokens of two rows, (2, length); those of the first are `shift` others."""
    steps_T = torch.arange(length)
    return torch.stack([5 + shift + 7 * steps_T, 3 + 11 * steps_T]) % vocabulary
