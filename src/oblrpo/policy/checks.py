"""What is tried before anything is sampled: whether forwards depend on a row alone, and the tape takes them."""

import inspect
import random
import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.memory import WithoutProducts
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.model import Policy
from oblrpo.policy.sequences import Sequences
from oblrpo.scores import ScoreTape, UnsupportedModelError

PROMPT, COMPLETION = 2, 3  # tokens of each row's parts

MIXES, MIXES_SHORT = 1e-3, 0.5
"""Nats by which a token's log-probability may change with another row's tokens: in float32, and in shorter types, in
which experts that get other tokens may round a token in another way."""


def check_scores(policy: Policy, cure: str) -> None:
    """Take scores of two short rows and forget them; `cure` says how to adapt attention alone, if that would do."""
    if found := noise(policy):
        raise InputError(
            f"the model adds noise to its forwards even in eval mode ({found}), so its scores would not be those of "
            "the policy that sampled: its code must add no noise where module.training is False."
        )
    ids_ST = two_rows(PROMPT + COMPLETION, policy.vocabulary).to(policy.device)
    ones_ST = torch.ones_like(ids_ST)
    rows = Sequences.of(ids_ST[:, :PROMPT], ones_ST[:, :PROMPT], ids_ST[:, PROMPT:], ones_ST[:, PROMPT:])
    try:
        with ScoreTape(policy.model, "streamed") as tape:
            tape.record(policy.logps(rows).logps_S)
    except UnsupportedModelError as error:
        cure = f" Adapters of attention work: {cure}." if "lora" in str(error).lower() else ""
        if "trainable_tokens" in str(error):
            cure = " With a head that is tied to the embedding, trainable_token_indices do not work: leave them out."
        raise InputError(f"scores of this model cannot be taken: {error}{cure}") from None


@torch.no_grad()
def noise(policy: Policy) -> str:
    """What noise the model adds to its forwards in the mode that it is in, in words; nothing where it adds none.

    Any change with the seed is noise, unless forwards from one seed differ, too: then it is what exceeds rounding.
    """
    ids_ST, logps = two_rows(PROMPT + COMPLETION, policy.vocabulary).to(policy.device), list[Tensor]()
    drawn = False
    # Where each of 12 layers is left out one time in 20, 2 in 1,000 such models keep all of them ten times.
    for seed in (0, *range(10)):
        with policy.seeded(seed), policy.arithmetic():
            before = _random_states(policy.device)
            logps.append(policy.model(input_ids=ids_ST, use_cache=False).logits.log_softmax(-1))
            drawn = drawn or before != _random_states(policy.device)
        if len(logps) == 2 and not drawn:  # no seed would change a thing
            break
    change = max(float((each - logps[0]).abs().nan_to_num().max()) for each in logps)
    exact = torch.equal(*logps[:2]) and policy.device.type == "cpu"  # a GPU may sum in another order at any time
    if change <= (0 if exact else MIXES if logps[0].dtype.itemsize >= 4 else MIXES_SHORT):
        return ""
    parts = [policy.model.config.get_text_config(), *getattr(policy.model, "peft_config", {}).values()]
    rates = {name: rate for part in parts for name, rate in vars(part).items() if isinstance(rate, float) and rate > 0}
    named = ", ".join(name for name in rates if re.search("drop|jitter|noise", name))
    return f"{named or 'random numbers'}; the same tokens differ by {change:.2g} nats from one forward to the next"


def _random_states(device: torch.device) -> list[Any]:
    """What says whether random numbers were drawn between two calls: of torch, Python and numpy.

    A model on a GPU may draw on the CPU, too: with LayerDrop it does so for the layers to leave out.
    """
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    of_numpy = [str(part) for part in numpy.random.get_state(legacy=True)]
    return [*(state.tolist() for state in of_torch), random.getstate(), of_numpy]


@torch.no_grad()
def check_lengths(policy: Policy, longest: Callable[[], int]) -> None:
    """Refuse a model whose rotary frequencies, for all rows of a forward, change with the longest that may come.

    Those of two tokens at the beginning and at the end of a row are compared bit by bit; `longest`, which is called
    where that matters, says how many tokens a row may have.
    """
    model = policy.model

    def frequencies(length: int = 2) -> list[Tensor]:
        ids_ST, places_ST = (torch.tensor([[last - 1, last]], device=policy.device) for last in (1, length - 1))
        with policy.arithmetic(), WithoutProducts():  # frequencies are those of places alone
            model(input_ids=ids_ST, position_ids=places_ST, use_cache=False)
        return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]

    def changed(length: int) -> bool:
        return not all(map(torch.equal, frequencies(), frequencies(length)))

    beyond = 1 if without_adapters(model).is_remote_code() else 2  # its tables may end with its context
    takes = "position_ids" in inspect.signature(without_adapters(model).forward).parameters
    if not (takes and frequencies() and changed(top := beyond * min(policy.longest, 2**20))):
        return
    most = bisect_left(range(top), True, lo=2, key=changed) - 1
    if (needed := longest()) > most:
        raise InputError(
            f"rows may have {needed} tokens, but if one has more than {most}, the model uses other rotary frequencies "
            "for it and all rows beside it (rope_type longrope or dynamic), so the policy that is trained would not be "
            f"the one that sampled. Limit prompt and completion together to {most} tokens (max_completion_length, in "
            "verl rollout.max_model_len), or give its config fixed frequencies: in rope_parameters, set short_factor "
            "equal to long_factor, or use another rope_type."
        )


def two_rows(length: int, vocabulary: int, shift: int = 0) -> Tensor:
    """The tokens of two rows, (2, length); those of the first are `shift` others."""
    steps_T = torch.arange(length, device="cpu")
    return torch.stack([5 + shift + 7 * steps_T, 3 + 11 * steps_T]) % vocabulary
