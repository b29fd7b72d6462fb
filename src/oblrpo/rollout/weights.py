"""A policy's weights as another engine can load them: under the names of its checkpoint, with adapters merged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import InputError


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every weight; a tied weight comes once, under the first of its names.

    The weight of a layer with LoRA adapters is W + sum of scale B A. It is computed aside: merging in place and undoing
    it would leave a rounding error in W at every update.

    Raises:
        InputError: an adapter cannot be merged into its layer's weight alone.
    """
    if not hasattr(model, "get_base_model"):
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()
        return
    base = model.get_base_model()
    layers = {f"{name}.weight": module for name, module in base.named_modules() if _is_adapted(module)}
    _check(base, layers)
    for full_name, parameter in base.named_parameters():
        name = re.sub(r"\.base_layer|\.modules_to_save\.[^.]+", "", full_name)
        if model.prefix in name or "original_module" in name:
            continue
        yield name, _merged(layers[name], parameter) if name in layers else parameter.detach()


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    merged = weight.detach().clone()
    if not layer.merged and not layer.disable_adapters:
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                merged += layer.get_delta_weight(adapter).to(merged)
    return merged


def _check(base: Any, layers: dict[str, Any]) -> None:
    tied = bool(getattr(base.config, "tie_word_embeddings", False))
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    for weight, layer in layers.items():
        name = weight.removesuffix(".weight")
        if tied and any(layer is end for end in ends):
            raise InputError(
                f"the adapter of {name} changes one use of a tied weight, which the sampler cannot take over; leave "
                "that layer out of the adapter, or use the sampler transformers."
            )
        other = [key for key in ("use_dora", "lora_bias") if any(getattr(layer, key, {}).values())]
        if other or not hasattr(layer, "get_delta_weight") or not hasattr(layer.base_layer, "weight"):
            raise InputError(
                f"the adapter of {name} ({', '.join([type(layer).__name__, *other])}) cannot be merged for the "
                "sampler; use plain LoRA, or the sampler transformers."
            )
