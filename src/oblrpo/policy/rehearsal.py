"""A pass over two short rows before anything is sampled: what the score tape cannot take is refused then."""

from __future__ import annotations

import torch

from oblrpo.errors import InputError
from oblrpo.policy.model import Policy
from oblrpo.policy.sequences import Sequences
from oblrpo.scores import ScoreTape, UnsupportedModelError

PROMPT, COMPLETION = 2, 3
"""Tokens of each row's parts."""


def rehearse(policy: Policy, cure: str) -> None:
    """Take scores of two short rows, as a step would, and forget them; no random number is drawn.

    `cure` says how to adapt attention alone, where adapters cannot be taken.
    """
    steps_T = torch.arange(PROMPT + COMPLETION)
    ids_ST = torch.stack([5 + 7 * steps_T, 3 + 11 * steps_T]).to(policy.device) % policy.vocabulary
    ones_ST = torch.ones_like(ids_ST)
    rows = Sequences.of(ids_ST[:, :PROMPT], ones_ST[:, :PROMPT], ids_ST[:, PROMPT:], ones_ST[:, PROMPT:])
    try:
        with ScoreTape(policy.model, "streamed") as tape:
            tape.record(policy.logps(rows).logps_S)
    except UnsupportedModelError as error:
        cure = f" Adapters of attention are taken: {cure}." if "lora" in str(error).lower() else ""
        raise InputError(f"scores of this model cannot be taken: {error}{cure}") from None
