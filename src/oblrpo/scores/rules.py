"""One rule per layer type: from a call's input, output and output gradient to the gradients of its parameters.

A rule is a function `(call, grad) -> {parameter name: contribution}`. It sees the activations of sequence s in row s
and must return a gradient that keeps the rows apart. `register_rule` adds one for a layer type of yours. A layer whose
parameters act inside its forward, where a gradient of the output says too little, has a recorded forward instead
(`experts`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oblrpo.scores.contributions import Contribution, Outer, Vector, on_cuda, wide


class UnsupportedModelError(TypeError):
    """The model holds or uses a trainable parameter in a way for which no exact norm is known."""


@dataclass(frozen=True)
class LayerCall:
    """One recorded forward call of a module: its `input`, (S, T, ...); its `output` too if the rule needs it."""

    module: nn.Module
    input: Tensor
    output: Tensor | None = None


Gradients: TypeAlias = Callable[[LayerCall, Tensor], dict[str, Contribution]]


class Rule(NamedTuple):
    """A rule's function, and whether it needs the call's output."""

    gradients: Gradients
    needs_output: bool


_RULES: dict[type | str, Rule] = {}


def register_rule(*layers: type | str, needs_output: bool = False) -> Callable[[Gradients], Gradients]:
    """Decorate a rule for modules of exactly these types, or of classes with these names ("*Name": ending so).

    Names serve classes of libraries that are not imported here. Subclasses of a type are not covered, because they may
    compute something else in `forward`.
    """

    def register(gradients: Gradients) -> Gradients:
        _RULES.update(dict.fromkeys(layers, Rule(gradients, needs_output)))
        return gradients

    return register


def rule_for(module: nn.Module) -> Rule | None:
    """The rule registered for this module's type, or None."""
    kinds = type(module).__mro__
    kind = kinds[2] if wrapped_by_fsdp(module) else kinds[0]  # of FSDPLinear, FSDPModule, Linear
    exact = _RULES.get(kind) or _RULES.get(kind.__name__)
    endings = [key for key in _RULES if isinstance(key, str) and key[0] == "*" and kind.__name__.endswith(key[1:])]
    return exact or (_RULES[endings[0]] if endings else None)


def wrapped_by_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) has wrapped the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and whoever wraps has done so
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@register_rule(nn.Linear)
def linear(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradients of y = x W' + b: G_W = sum_t grad_t x_t', G_b = sum_t grad_t."""
    left, right = _tokens(grad), _tokens(call.input)
    parts: dict[str, Contribution] = {"weight": Outer(left, right, rows=left.shape[-1])}
    if getattr(call.module, "bias", None) is not None:
        parts["bias"] = Vector(_sum(left))
    return parts


def product(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradients of y = x W' + b by the parts' names: of W ("weight"), W' ("transposed") and b ("bias")."""
    left, right = _tokens(grad), _tokens(call.input)
    return {
        "weight": Outer(left, right, rows=left.shape[-1]),
        "transposed": Outer(right, left, rows=right.shape[-1]),
        "bias": Vector(_sum(left)),
    }


@register_rule("Conv1D")
def conv1d(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradients of GPT-2's y = x W + b, W (in, out): G_W = sum_t x_t grad_t', G_b = sum_t grad_t."""
    parts = product(call, grad)
    return {"weight": parts["transposed"], "bias": parts["bias"]}


@register_rule(nn.Embedding)
def embedding(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradient of y_t = W[id_t]: G_W[v] = sum_{t: id_t = v} grad_t; the row `padding_idx` gets none, as in autograd."""
    module = call.module
    assert isinstance(module, nn.Embedding)
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise UnsupportedModelError("Embedding with scale_grad_by_freq or max_norm has no per-sequence gradient.")
    return {"weight": lookup(call.input, grad, module.num_embeddings, module.padding_idx)}


def lookup(ids: Tensor, grad: Tensor, rows: int, padding_idx: int | None) -> Outer:
    """The gradient of a table of so many rows, of which these were looked up."""
    index_ST, right = ids.reshape(len(ids), -1), _tokens(grad)
    if padding_idx is not None:
        right = right.masked_fill((index_ST == padding_idx % rows)[..., None], 0)
    return Outer(index_ST, right, rows)


@register_rule("Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding")
def scaled_embedding(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradient of Gemma's y_t = c W[id_t]."""
    scale = call.module.embed_scale
    assert isinstance(scale, Tensor)
    return embedding(call, grad * scale.to(grad.dtype))


@register_rule(nn.LayerNorm)
def layer_norm(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradients of y = w * n(x) + b: G_w = sum_t grad_t * n(x_t), G_b = sum_t grad_t."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    normalised = torch.nn.functional.layer_norm(wide(call.input), module.normalized_shape, eps=module.eps)
    parts: dict[str, Contribution] = {"weight": _gain(grad, normalised, module.weight)}
    if module.bias is not None:
        parts["bias"] = _gain(grad, None, module.bias)
    return parts


@register_rule(nn.RMSNorm, "*RMSNorm", needs_output=True)
def rms_norm(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
    """Gradient of y = (c + w) * x/rms(x), with c = 0 or, in Gemma, 1: G_w = sum_t grad_t * y_t / (c + w).

    Without the output, which the recorder keeps where `divisible` says so, x is normalised again.
    """
    weight = call.module.weight
    assert isinstance(weight, Tensor)
    if call.output is None:
        return {"weight": _gain(grad, _with_weight(call.module, call.input, 1 - gain_offset(call.module)), weight)}
    gain = wide(weight) + gain_offset(call.module)
    return {"weight": Vector(_gain(grad, call.output, weight).value_SC / gain.flatten())}


def divisible(norms: Iterable[nn.Module]) -> bool:
    """Whether y / (c + w) is lost to underflow in none of these norms, as seen in one look at all; not if sharded."""
    gains = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for norm in norms:
        weight = norm._parameters["weight"]
        if weight is None or hasattr(weight, "full_tensor"):
            return False
        gains[weight.device, weight.dtype].append(weight.detach().flatten() + gain_offset(norm))
    return not any(
        bool((torch.cat(same).abs() < torch.finfo(dtype).tiny ** 0.5).any()) for (_, dtype), same in gains.items()
    )


_GAIN_OFFSETS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


def gain_offset(module: nn.Module) -> float:
    """The c of a norm that multiplies by c + w, found by trying it: transformers has some 200 RMSNorm classes."""
    if module not in _GAIN_OFFSETS:
        weight = module._parameters.get("weight")
        if weight is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no weight of its own.")
        probe = torch.linspace(-1, 2, weight.numel(), device=weight.device).view(1, 1, *weight.shape)
        try:
            zero, one, two = (_with_weight(module, probe, w) for w in (0, 1, 2))
        except Exception as error:  # any class may be named so
            raise UnsupportedModelError(f"{type(module).__name__} does not map one tensor to one: {error}.") from None
        unit = one - zero
        scale = 1e-3 * float(unit.abs().amax())
        for offset in (0.0, 1.0):
            if (zero - offset * unit).abs().amax() <= scale and (two - (2 + offset) * unit).abs().amax() <= scale:
                _GAIN_OFFSETS[module] = offset
                break
        else:
            raise UnsupportedModelError(f"{type(module).__name__} is not a norm with gain w or 1 + w.")
    return _GAIN_OFFSETS[module]


def _with_weight(module: nn.Module, input: Tensor, value: float) -> Tensor:
    """The norm's output for a constant weight, from the module's own forward and so with its own eps and casts."""
    weight = module._parameters["weight"]
    assert weight is not None
    module._parameters["weight"] = torch.full(  # type: ignore[assignment]
        weight.shape, value, dtype=input.dtype, device=input.device
    )
    try:
        with torch.no_grad():
            output: Tensor = module.forward(input)
            return output
    finally:
        module._parameters["weight"] = weight


def _gain(grad: Tensor, factor: Tensor | None, parameter: Tensor) -> Vector:
    """Gradient sum_t grad_t * factor_t of an elementwise parameter; on CUDA of products in the type that they have."""
    grad = grad if on_cuda(grad) else wide(grad)
    product = grad if factor is None else grad * factor
    return Vector(_sum(product.reshape(grad.shape[0], -1, parameter.numel())))


def _tokens(activation: Tensor) -> Tensor:
    """An activation (S, ..., d) as (S, T, d): every position but the row counts as a token."""
    return activation.reshape(activation.shape[0], -1, activation.shape[-1])


def _sum(rows_STC: Tensor) -> Tensor:
    return rows_STC.sum(1, dtype=torch.promote_types(rows_STC.dtype, torch.float32))
