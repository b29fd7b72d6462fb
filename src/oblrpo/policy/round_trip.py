"""A round trip before anything is sampled: a policy that its checkpoint would not bring back is refused then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.policy.adapters import without_adapters
from oblrpo.policy.files import reason
from oblrpo.policy.load import load_policy
from oblrpo.policy.model import Policy
from oblrpo.policy.rehearsal import two_rows
from oblrpo.settings import PolicyConfig

AFFORDABLE = 2**32
"""Bytes of weights up to which a model is written and read again: 4 GB take a disk some seconds, and memory twice."""
TOKENS = 16  # of each row: a few, so that positions count
ADAPTED = (
    "save the model beneath the adapters with its tokenizer (save_pretrained), load it from that folder, and add the "
    "adapters to it, with an init_lora_weights that changes no other weight at random"
)
WHOLE = (
    "let its config and class say what was changed in it, such as num_hidden_layers or tie_word_embeddings, and give "
    "each layer weights of its own"
)


def check_round_trip(policy: Policy, config: PolicyConfig, given: bool, place: Path) -> None:
    """Save a policy into a folder in `place`, load it and compare: weights, and log-probabilities of two short rows.

    Adapters are loaded onto the model that they name, as evaluation and export do it: that model is compared, too. Of
    whole models beyond `AFFORDABLE` bytes only names and shapes are compared, with those that the config makes. Such a
    model beneath adapters is read where the program has `given` it, and is not what we have read from there ourselves.

    Raises:
        InputError: what differs, and how to make it agree.
    """
    if policy.model is (inner := without_adapters(policy.model)) and getattr(inner, "hf_quantizer", None):
        raise InputError("the model is quantised, so that its weights cannot be trained; add adapters with lora.")
    if given:
        loading = {"trust_remote_code": inner.is_remote_code(), "attn_implementation": inner.config._attn_implementation}
        config = replace(config, dtype=str(inner.dtype).removeprefix("torch."), **loading)
    config = replace(config, gradient_checkpointing=False)
    try:
        with TemporaryDirectory(prefix=".round_trip_", dir=place) as folder, policy.seeded(0), _moved(policy):
            differs = _differences(policy, config, given, folder)
    except OSError as error:
        raise InputError(f"cannot try to save the model in {place}: {error.strerror or error}.") from None
    except Exception as error:
        differs = reason(error).replace(folder, "a checkpoint")
    if differs:
        cure = WHOLE if policy.model is inner else ADAPTED
        raise InputError(f"a checkpoint would not bring this policy back: {differs}; {cure}.")


@contextmanager
def _moved(policy: Policy) -> Iterator[None]:
    """Let adapters be what training makes of them for a while: new ones add nothing, however they are loaded."""
    moved = policy.parameters if policy.model is not without_adapters(policy.model) else []
    before = [parameter.detach().clone() for parameter in moved]
    with torch.no_grad():
        try:
            for parameter in moved:
                parameter += 0.1 * torch.randn_like(parameter)  # large beside rounding
            yield
        finally:
            for parameter, value in zip(moved, before, strict=True):
                parameter.copy_(value)


def _differences(policy: Policy, config: PolicyConfig, given: bool, folder: str) -> str:
    """What is other in what a checkpoint brings back, in words; empty if nothing is."""
    inner = without_adapters(policy.model)
    small = sum(p.numel() * p.element_size() for p in inner.parameters()) <= AFFORDABLE
    if policy.model is inner:
        twice = _weights(inner).keys() - dict(inner.named_parameters()).keys() - inner.all_tied_weights_keys.keys()
        if twice:
            return f"{min(twice)} is a weight that is used under another name, too, which its config does not say"
        inner.config.save_pretrained(folder)
        with torch.device("meta"):
            made = type(inner)(type(inner.config).from_pretrained(folder))
        if (differs := _other_weights(_weights(policy.model), _weights(made))) or not small:
            return differs
    policy.save(Path(folder))
    if not (small or given):
        return ""
    again = load_policy(folder, replace(config, device=str(policy.device) if small else "cpu"), train=False)
    if (differs := _other_weights(_weights(policy.model), _weights(again.model))) or not small:
        return differs
    types = {p.dtype for p in policy.model.parameters() if p.is_floating_point()} | {policy.arithmetic().fast_dtype}
    near = max(torch.finfo(each).eps for each in types) ** 0.5  # half of the digits are left to rounding
    ids_ST = two_rows(min(TOKENS, policy.longest), policy.vocabulary).to(policy.device)
    logps, others = (_logps(each, ids_ST) for each in (policy, again))
    if torch.allclose(logps, others, rtol=near, atol=near, equal_nan=True):
        return ""
    return f"log-probabilities of its tokens differ by up to {(logps - others).abs().max():.2g} nats, with equal weights"


def _logps(policy: Policy, ids_ST: Tensor) -> Tensor:
    with policy.arithmetic():
        return policy.model(input_ids=ids_ST, use_cache=False).logits.float().log_softmax(-1)


def _weights(model: Any) -> dict[str, Tensor]:
    """The weights of a model by name; of its adapters only the active one, under the name that it is loaded by."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    if not (adapters := getattr(model, "peft_config", {})):
        return weights
    [active] = model.active_adapters
    parts = {name: name.split(".") for name in weights if not (adapters.keys() - {active}) & set(name.split("."))}
    return {".".join("default" if x == active else x for x in parts[name]): weights[name] for name in parts}


def _other_weights(own: dict[str, Tensor], again: dict[str, Tensor]) -> str:
    """The first weight that is lost, made up or other; on the device meta there are only names and shapes."""
    if lost := own.keys() - again.keys():
        return f"{len(lost)} of its weights would be lost, as {min(lost)}"
    if made_up := again.keys() - own.keys():
        return f"{len(made_up)} weights would be made up, as {min(made_up)}"
    for name, weight in own.items():
        if weight.shape != (other := again[name]).shape:
            return f"{name} would have the shape {tuple(other.shape)} and not {tuple(weight.shape)}"
        wide = torch.promote_types(weight.dtype, other.dtype)
        same = other.is_meta or torch.allclose(weight.to(other.device, wide), other.to(wide), 0, 0, equal_nan=True)
        if not same:
            return f"{name} would have other values"
    return ""
