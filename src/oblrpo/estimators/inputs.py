"""What a baseline may look at beside the rewards: declared and gathered here, for every caller."""

from __future__ import annotations

import torch
from torch import Tensor


def baseline_inputs(
    token_mask_PGT: Tensor, norm2_PG: Tensor | None = None, logit_norm2_PGT: Tensor | None = None
) -> dict[str, Tensor]:
    """All inputs of `baseline` that follow from what was measured of P prompts with G outputs of T tokens each.

    A new input is one more entry here: the trainer, the ledger, the adapters, the theory and the check of assumption 1
    all call this function.

    Args:
        token_mask_PGT: 1 for the policy's own tokens.
        norm2_PG: squared score norms, or a proxy of them; None if they were not measured.
        logit_norm2_PGT: `scores.logit_norm2` of every token; None if they were not measured.
    """
    inputs = {
        "norm2_PG": norm2_PG,
        "length_PG": token_mask_PGT.sum(2),
        "logit_norm2_PGT": logit_norm2_PGT,
        "token_mask_PGT": token_mask_PGT,
    }
    return {name: value for name, value in inputs.items() if value is not None}


def random_inputs(prompts: int, outputs: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """All inputs of every baseline, drawn at random on the CPU in float64, with outputs of 1 to `tokens` tokens."""
    shape = (prompts, outputs)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64, device="cpu")

    lengths_PG = torch.randint(1, tokens + 1, shape, generator=generator, device="cpu")
    norm2_PG, logit_norm2_PGT = rand(*shape), rand(*shape, tokens)
    mask_PGT = (torch.arange(tokens, device="cpu") < lengths_PG[..., None]).double()
    return baseline_inputs(mask_PGT, norm2_PG, logit_norm2_PGT)
