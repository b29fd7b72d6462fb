"""The head of a causal language model, where it is nothing but one product with the hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class PlainHead(NamedTuple):
    """A model in two pieces, of which the second can be applied to a few tokens at a time."""

    decoder: Any
    """From token ids to the last hidden states."""
    linear: nn.Linear
    """From hidden states to logits."""

    def hidden(self, ids_ST: Tensor) -> Tensor:
        """The last hidden states of rows without padding on the left, (S, T, C)."""
        hidden_STC: Tensor = self.decoder(input_ids=ids_ST, use_cache=False).last_hidden_state
        return hidden_STC


@torch.no_grad()
def plain_head(model: Any, device: torch.device) -> PlainHead | None:
    """The model's two pieces, or None where logits are more than their product: soft-capped, scaled, or adapted.

    Which it is, is tried on two tokens: the pieces must give the model's own logits, bit by bit.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    linear, decoder = whole.get_output_embeddings(), whole.base_model
    if type(linear) is not nn.Linear or decoder is whole:
        return None
    found = PlainHead(decoder, linear)
    ids_ST = torch.tensor([[0, 1]], device=device)
    same = torch.equal(model(input_ids=ids_ST, use_cache=False).logits, linear(found.hidden(ids_ST)))
    return found if same else None
