"""What is tried before anything is sampled: forwards of two short rows, and a pass of the score tape over them.

A score is that of the policy which sampled only where the log-probabilities of a row are a function of its tokens
alone: no random numbers in them, and no other row. What is not so is refused, with its cure.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.model import Policy
from oblrpo.policy.sequences import Sequences
from oblrpo.scores import ScoreTape, UnsupportedModelError

Arithmetic = Callable[[], AbstractContextManager[Any]]

PROMPT, COMPLETION = 2, 3
"""Tokens of each row's parts."""

MIXES, MIXES_SHORT = 1e-3, 0.5
"""Nats by which a token's log-probability may change with another row's tokens: in float32, and in shorter types, in
which experts that get other tokens may round a token in another way."""

FARTHEST = 2**24
"""Positions up to which float32 tells each from the next."""

NOISE = re.compile("drop|jitter|noise")
"""What configs call the rates of the noise that models add while they train."""


def rehearse(policy: Policy, cure: str) -> None:
    """Take scores of two short rows and forget them; `cure` says how to adapt attention alone, if that would do.

    The policy is in the mode in which it samples.
    """
    if found := noise(policy.model, policy.arithmetic):
        raise InputError(
            f"the model adds noise to its forwards ({found}) in eval mode, too, so that its scores are not those of the "
            "policy that sampled; its code must add none where `module.training` is False."
        )
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


def noise(model: Any, arithmetic: Arithmetic) -> str:
    """What noise a model adds to its forwards in the mode that it is in, in words; nothing where it adds none.

    Two forwards of the same tokens are compared, and torch's random state before and after one. Noise may be too rare
    for two to differ (a layer left out in a hundred), and what is drawn of no use: so a state that moves counts where
    they do, or where the config has a rate of noise.

    Args:
        model: the model, whole or sharded; then every rank must call this.
        arithmetic: the context for the precision of its forwards.
    """
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = _random_state(device)
        logp_TV, most, _ = _read(model, arithmetic)
        drawn = not torch.equal(_random_state(device), before)
        change = _change(logp_TV, _read(model, arithmetic)[0])
    parts = [without_adapters(model).config.get_text_config(), *getattr(model, "peft_config", {}).values()]
    rates = {name: rate for part in parts for name, rate in vars(part).items() if NOISE.search(name)}
    named = [name for name, rate in rates.items() if isinstance(rate, float) and rate > 0]
    if not ((change > 0 or named) if drawn else change > most):
        return ""
    return f"{', '.join(named) or 'random numbers'}; two forwards of the same tokens differ by {change:.2g} nats"


def check_lengths(model: Any, arithmetic: Arithmetic, longest: Callable[[], int], shorten: str) -> None:
    """Refuse a model that reads a row in another way where it, or one beside it, is longer than some number of tokens.

    The row is read beside a second of a few tokens that stand as far on as those of any row may, so that no forward is
    long: rotary embeddings go by positions. Their frequencies are compared bit by bit, in any precision.

    Args:
        model, arithmetic: as for `noise`.
        longest: says how many tokens a row may have; called only where that matters.
        shorten: how to have shorter rows.
    """
    row = PROMPT + COMPLETION

    def follows(length: int) -> bool:
        """Whether the first row changes with a second of this length."""
        (logp_TV, most, near), (beside_TV, _, far) = (_read(model, arithmetic, each) for each in (row, length))
        return not all(map(torch.equal, near, far)) or _change(logp_TV, beside_TV) > most

    inner = without_adapters(model)
    context = getattr(inner.config.get_text_config(), "max_position_embeddings", None) or FARTHEST
    rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    if not rotary or "position_ids" not in inspect.signature(inner.forward).parameters:
        return
    if not follows(top := min(2 * context, FARTHEST)):
        return
    most = bisect_left(range(top), True, lo=row + 1, key=follows) - 1
    if (needed := longest()) > most:
        raise InputError(
            f"rows may have {needed} tokens, and where one has more than {most}, this model reads it, and all beside "
            "it, by other rotary frequencies (rope_type longrope or dynamic): it would sample from one policy, and "
            f"another would be trained. {shorten} so that prompt and completion have at most {most} together, or give "
            "its config frequencies that stay: in rope_parameters, short_factor as long_factor, or another rope_type."
        )


@torch.no_grad()
def _read(model: Any, arithmetic: Arithmetic, length: int = 0) -> tuple[Tensor, float, list[Tensor]]:
    """Log-probabilities after each token of a short row, what rounding may make of them, and the rotary frequencies.

    Where a length is given, the row beside it ends at the last position of a row so long.
    """
    device = next(model.parameters()).device
    ids_ST = two_rows(PROMPT + COMPLETION, model.config.get_text_config().vocab_size).to(device)
    near_T = torch.arange(ids_ST.shape[1], device=device)
    places = {"position_ids": torch.stack([near_T, near_T + length - len(near_T)])} if length else {}
    with arithmetic():
        logits_TV = model(input_ids=ids_ST, use_cache=False, **places).logits[0]
    frequencies = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    return logits_TV.float().log_softmax(-1), MIXES if logits_TV.dtype.itemsize >= 4 else MIXES_SHORT, frequencies


def _change(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().nan_to_num().max())


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def two_rows(length: int, vocabulary: int, shift: int = 0) -> Tensor:
    """The tokens of two rows, (2, length); those of the first are `shift` others."""
    steps_T = torch.arange(length)
    return torch.stack([5 + shift + 7 * steps_T, 3 + 11 * steps_T]) % vocabulary
