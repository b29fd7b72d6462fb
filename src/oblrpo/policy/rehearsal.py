"""What is tried before anything is sampled: forwards of two short rows, and a pass of the score tape over them.

A score is that of the policy which sampled only where the log-probabilities of a row are a function of its tokens
alone: no random numbers in them, and no other row. What is not so is refused, with its cure.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.model import Policy
from oblrpo.policy.sequences import Sequences
from oblrpo.scores import ScoreTape, UnsupportedModelError

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
            f"the model adds noise to its forwards ({found}) in eval mode, too, so that its scores are not those of "
            "the policy that sampled; its code must add none where `module.training` is False."
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


def noise(model: Any, arithmetic: Any) -> str:
    """What noise a model, on every rank alike, adds to its forwards in the mode that it is in; nothing if it adds none.

    Two forwards of the same tokens are compared, and torch's random state around one: a state that moves counts where
    they differ at all, or where the config has a rate of noise, which may be too rare to be seen (a layer left out in a
    hundred). `arithmetic` makes the context for their precision.
    """
    device, inner = next(model.parameters()).device, without_adapters(model)
    generators = [torch.get_rng_state] + [torch.cuda.get_rng_state] * (device.type == "cuda")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = [state() for state in generators]
        one_TV, _ = _read(model, arithmetic)
        drawn = not all(torch.equal(state(), was) for state, was in zip(generators, before, strict=True))
        change = float((_read(model, arithmetic)[0] - one_TV).abs().nan_to_num().max())
    parts = [inner.config.get_text_config(), *getattr(model, "peft_config", {}).values()]
    rates = {name: rate for part in parts for name, rate in vars(part).items() if NOISE.search(name)}
    named = [name for name, rate in rates.items() if isinstance(rate, float) and rate > 0]
    rounding = MIXES if one_TV.dtype.itemsize >= 4 else MIXES_SHORT
    is_there = change > 0 or bool(named) if drawn else change > rounding
    words = f"{', '.join(named) or 'random numbers'}; two forwards of the same tokens differ by {change:.2g} nats"
    return words if is_there else ""


def check_lengths(model: Any, arithmetic: Any, longest: Callable[[], int], shorten: str) -> None:
    """Refuse a model whose rotary frequencies change, for every row of a forward, with the longest row that may come.

    They are compared bit by bit, after forwards of two short rows of which the second stands at the end of a long one.
    `longest` says how many tokens a row may have, and is called where that matters; `shorten`, how to have fewer.
    """
    text, forward = model.config.get_text_config(), without_adapters(model).forward
    top, row = min(2 * (getattr(text, "max_position_embeddings", None) or FARTHEST), FARTHEST), PROMPT + COMPLETION

    def changed(length: int) -> bool:
        near, far = (_read(model, arithmetic, each)[1] for each in (row, length))
        return not all(map(torch.equal, near, far))

    rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    if not rotary or "position_ids" not in inspect.signature(forward).parameters or not changed(top):
        return
    most = bisect_left(range(top), True, lo=row + 1, key=changed) - 1
    if (needed := longest()) > most:
        raise InputError(
            f"rows may have {needed} tokens, and where one has more than {most}, this model reads it, and all beside "
            "it, by other rotary frequencies (rope_type longrope or dynamic): it would sample from one policy, and "
            f"another would be trained. {shorten} so that prompt and completion have at most {most} together, or give "
            "its config frequencies that stay: in rope_parameters, short_factor as long_factor, or another rope_type."
        )


@torch.no_grad()
def _read(model: Any, arithmetic: Any, length: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of a short row, beside one that stands at the end of a row of this length; frequencies."""
    ids_ST = two_rows(PROMPT + COMPLETION, model.config.get_text_config().vocab_size)
    steps_T = torch.arange(ids_ST.shape[1])
    places_ST = torch.stack([steps_T, steps_T + length - len(steps_T)])
    given = {"input_ids": ids_ST} | ({"position_ids": places_ST} if length else {})
    device = next(model.parameters()).device
    with arithmetic():
        logits_TV = model(**{name: each.to(device) for name, each in given.items()}, use_cache=False).logits[0]
    frequencies = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    return logits_TV.log_softmax(-1), frequencies


def two_rows(length: int, vocabulary: int, shift: int = 0) -> Tensor:
    """The tokens of two rows, (2, length); those of the first are `shift` others."""
    steps_T = torch.arange(length)
    return torch.stack([5 + shift + 7 * steps_T, 3 + 11 * steps_T]) % vocabulary
