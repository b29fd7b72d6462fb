"""What is saved is what was trained: tried once before step 1, and a model's own generation defaults as they came."""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import cached_file

from oblrpo.errors import InputError
from oblrpo.model_files import reason
from oblrpo.policy.adapters import load_adapter_weights, without_adapters
from oblrpo.settings import PolicyConfig

OF_IMAGES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""What a model that also sees is used with, beside its tokenizer."""
AFFORDABLE = 2**32
"""Bytes of weights up to which a model is written and read again: 4 GB take a disk some seconds, and memory twice."""
LOST = "is trained, but PEFT does not save it with the adapters"
LOST_CURE = "freeze it (requires_grad_(False)), or name its module in modules_to_save; learn prompts without an encoder"


@contextmanager
def own_settings_aside(model: Any) -> Iterator[None]:
    """Set a model's own generation defaults aside, such as top-p: they would change the distribution."""
    # PEFT hands its model's on to the one beneath.
    models = list({id(part): part for part in (model, without_adapters(model))}.values())
    defaults = [part.generation_config for part in models]
    for part in models:
        part.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for part, own in zip(models, defaults, strict=True):
            part.generation_config = own


def save_model(model: Any, folder: Path, end_tokens: list[int]) -> None:
    """Write a model with its generation config as it is, but for the tokens that end a completion.

    transformers refuses to write some configs that models come with, such as a temperature without do_sample.
    """
    with own_settings_aside(model):
        model.save_pretrained(folder)
    own = copy.deepcopy(model.generation_config)
    if end_tokens not in ([own.eos_token_id], own.eos_token_id):
        own.eos_token_id = end_tokens
    own.to_json_file(folder / "generation_config.json")
    if model.name_or_path and model.config.get_text_config() is not model.config:
        for name in OF_IMAGES:
            with suppress(OSError):  # a name that is no folder, and not on the hub
                if found := cached_file(model.name_or_path, name, _raise_exceptions_for_missing_entries=False):
                    shutil.copyfile(found, folder / name)


def check_saved(policy: Any, config: PolicyConfig, given: bool, place: Path, write: bool = True) -> None:
    """Save a policy into a folder in `place`, load it and compare: weights, and log-probabilities of two short rows.

    Adapters are read again alone, onto a model that was loaded by name. One that the program has `given` is compared,
    too, with the model that they name, as evaluation and export load it; beyond `AFFORDABLE` bytes (on a GPU, half of
    its free memory) by its weights alone. Of whole models beyond that, and of all where not to `write` any, names and
    shapes are compared, with those that the saved config makes.
    InputError: what differs, and the cure.
    """
    inner = without_adapters(policy.model)
    if policy.model is inner and getattr(inner, "hf_quantizer", None):
        raise InputError("the model is quantised, so its weights cannot be trained; add adapters with lora.")
    adapters = [] if policy.model is inner else policy.parameters
    before = [parameter.detach().clone() for parameter in adapters]
    config = replace(config, trust_remote_code=config.trust_remote_code or inner.is_remote_code())
    folder = ""
    with torch.no_grad(), policy.seeded(0):
        try:
            for parameter in adapters:  # new ones add nothing, however they are loaded
                parameter += 0.1 * torch.randn_like(parameter)  # large beside rounding
            with TemporaryDirectory(prefix=".saved_", dir=place) as folder:
                differs = _differences(policy, config, given, folder, write)
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(f"cannot test saving the model in {place}: {why}.") from None
        except Exception as error:
            differs = reason(error).replace(folder or "\0", "a checkpoint")
        finally:
            for parameter, value in zip(adapters, before, strict=True):
                parameter.copy_(value)
    if differs:
        cures = (
            "make config and class say what was changed, such as num_hidden_layers, and let no layers share a weight",
            "save the model beneath the adapters with its tokenizer (save_pretrained), load it from there and add them "
            "to it, with an init_lora_weights that changes no other weight at random",
        )
        cure = LOST_CURE if LOST in differs else cures[bool(adapters)]
        raise InputError(f"a checkpoint would not restore this policy: {differs}; {cure}.")


def _differences(policy: Any, config: PolicyConfig, given: bool, folder: str, write: bool) -> str:
    """What is other in what a checkpoint brings back, in words; empty if nothing is."""
    from oblrpo.policy.checks import two_rows
    from oblrpo.policy.load import load_policy

    inner, own = without_adapters(policy.model), _weights(policy.model)
    tied, size = inner.all_tied_weights_keys, sum(weight.numel() * weight.element_size() for weight in own.values())
    on_gpu = policy.device.type == "cuda"
    most = min(AFFORDABLE, torch.cuda.mem_get_info(policy.device)[0] / 2) if on_gpu else AFFORDABLE
    small = write and size <= most
    if policy.model is inner:
        if twice := own.keys() - dict(inner.named_parameters()).keys() - {*tied, *tied.values()}:
            return f"{min(twice)} is a weight that has another name, too, which its config does not say"
        inner.config.save_pretrained(folder)
        with torch.device("meta"):
            made = type(inner)(type(inner.config).from_pretrained(folder))
        if (differs := _other_weights(own, _weights(made))) or not small:
            return differs
    policy.save(Path(folder))
    if policy.model is not inner:  # as a run is resumed
        trained = {name: (p, p.clone()) for name, p in policy.model.named_parameters() if p.requires_grad}
        for parameter in policy.parameters:
            parameter.zero_()
        load_adapter_weights(policy.model, Path(folder))
        if lost := [name for name, (now, before) in trained.items() if not torch.equal(now, before)]:
            return f"{lost[0]} {LOST}"
    if not given and (policy.model is not inner or not small):
        return ""  # what lies beneath adapters is read from where it came from
    again = load_policy(folder, replace(config, device=str(policy.device) if small else "cpu"), train=False)
    if (differs := _other_weights(own, _weights(again.model))) or not small:
        return differs
    rough = policy.low_precision or hasattr(inner, "hf_quantizer")
    near = torch.finfo(torch.bfloat16 if rough else torch.float32).eps ** 0.5  # half of the digits are left to rounding
    ids_ST = two_rows(min(16, policy.longest), policy.vocabulary).to(policy.device)
    with policy.arithmetic():
        logits = [each.model(input_ids=ids_ST, use_cache=False).logits.float() for each in (policy, again)]
    logps, others = (each.log_softmax(-1) for each in logits)
    same = torch.allclose(logps, others, rtol=near, atol=near, equal_nan=True)
    return "" if same else f"log-probabilities of tokens differ by up to {(logps - others).abs().max():.2g} nats"


def _weights(model: Any) -> dict[str, Tensor]:
    """The weights of a model by name, without those of adapters, whose name is another when they are loaded."""
    adapters = getattr(model, "peft_config", {}).keys()
    weights = without_adapters(model).named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in weights if not adapters & set(name.split("."))}


def _other_weights(own: dict[str, Tensor], again: dict[str, Tensor]) -> str:
    """The first weight that is lost, made up or other; of those on the device meta there are only names and shapes."""
    for many, what in ((own.keys() - again.keys(), "lost"), (again.keys() - own.keys(), "made up")):
        if many:
            return f"{len(many)} of its weights would be {what}, as {min(many)}"
    for name, weight in own.items():
        if not weight.is_floating_point():
            continue  # in 4 or 8 bits, packed as a device takes them
        if weight.shape != (other := again[name]).shape:
            return f"{name} would have the shape {tuple(other.shape)} and not {tuple(weight.shape)}"
        if other.is_meta or (other.dtype == weight.dtype and torch.equal(other, weight)):
            continue
        if not any(torch.allclose(weight.to(x), other.to(x), 0, 0, equal_nan=True) for x in (other, weight)):
            return f"{name} would have other values"
    return ""
