"""A policy's weights as another engine takes them: by the names of a checkpoint, adapters merged aside."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.policy.adapters import without_adapters


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name in a checkpoint, adapters merged; that of a tied head once (`is_tied`).

    The weight of a layer with LoRA adapters is W + sum of scale B A. It is computed aside: merging in place and undoing
    it would leave a rounding error in W at every update. Weights that transformers joins when it loads a checkpoint,
    such as those of experts, are taken apart as it does when it saves one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    base = without_adapters(model)
    if getattr(base, "_weight_conversions", None) or get_model_conversion_mapping(base, add_legacy=False):
        yield from revert_weight_conversion(base, dict(_weights(model, base))).items()
    else:
        yield from _weights(model, base)


def is_tied(model: Any) -> bool:
    """Whether one weight is embedding and head, whatever the config says; adapters on one of the two untie it."""
    ends = [without_adapters(model).get_input_embeddings(), without_adapters(model).get_output_embeddings()]
    return ends[1] is None or (ends[0].weight is ends[1].weight and not any(hasattr(end, "base_layer") for end in ends))


def check_weights(model: Any) -> None:
    """Refuse a policy whose weights another engine cannot take over: quantised, or adapters that are not plain LoRA."""
    base = without_adapters(model)
    if getattr(base, "is_quantized", False):
        raise InputError(
            "the policy's weights are quantised, and the sampler needs them in full; load them in bfloat16 (without "
            "load_in_4bit), or use the sampler transformers."
        )
    for name, layer in _adapted(base).items():
        other = [key for key in ("use_dora", "lora_bias") if any(getattr(layer, key, {}).values())]
        if other or not hasattr(layer, "get_delta_weight") or not hasattr(layer.base_layer, "weight"):
            raise InputError(
                f"the adapter of {name} ({', '.join([type(layer).__name__, *other])}) cannot be merged for the "
                "sampler; use plain LoRA, or the sampler transformers."
            )


def _adapted(base: Any) -> dict[str, Any]:
    named = base.named_modules()
    return {name: each for name, each in named if hasattr(each, "base_layer") and hasattr(each, "active_adapters")}


def _weights(model: Any, base: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its own name, adapters merged, and the buffers that a checkpoint holds."""
    adapted, saved = _adapted(base), base.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in base.named_buffers() if name in saved)
    for full_name, weight in chain(base.named_parameters(remove_duplicate=is_tied(base)), buffers):
        name = re.sub(r"\.base_layer|\.modules_to_save\.[^.]+", "", full_name)
        if base is not model and (model.prefix in name or "original_module" in name):
            continue
        layer = adapted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, weight.detach() if layer is None else _merged(layer, weight)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    merged = weight.detach().clone()
    if not layer.merged and not layer.disable_adapters:
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                merged += layer.get_delta_weight(adapter).to(merged)
    return merged
