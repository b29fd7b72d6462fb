"""One rule per layer type: from a call's input, output and output gradient to the gradients of its parameters.

A rule is a function `(call, grad) -> {parameter name: contribution}`. It sees batch row s of the activations of
sequence s and must return a gradient that keeps the rows apart. `register_rule` adds one for a layer type of yours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from oblrpo.scores.contributions import Contribution, Outer, Vector


class UnsupportedModelError(TypeError):
    """The model holds or uses a trainable parameter in a way for which no exact norm is known."""


@dataclass(frozen=True)
class Call:
    """One recorded forward call of a module: `input` and `output`, both with batch rows first."""

    module: nn.Module
    input: Tensor
    output: Tensor


Rule: TypeAlias = Callable[[Call, Tensor], dict[str, Contribution]]

_RULES: dict[type | str, Rule] = {}


def register_rule(*layers: type | str) -> Callable[[Rule], Rule]:
    """Decorator: use this rule for modules of exactly these types (a name stands for a class of that name).

    Names serve classes of libraries that are not imported here; subclasses are not covered, because they may compute
    something else in `forward`.
    """

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def rule_for(module: nn.Module) -> Rule | None:
    """The rule registered for this module's type, or None."""
    return _RULES.get(type(module)) or _RULES.get(type(module).__name__)


@register_rule(nn.Linear)
def linear(call: Call, grad: Tensor) -> dict[str, Contribution]:
    """Y = x W' + b: G_W = sum_t grad_t x_t', G_b = sum_t grad_t."""
    left, right = _tokens(grad), _tokens(call.input)
    return {"weight": Outer(left, right, rows=left.shape[-1]), "bias": Vector(left.sum(1))}


@register_rule(nn.Embedding)
def embedding(call: Call, grad: Tensor) -> dict[str, Contribution]:
    """y_t = W[id_t]: G_W[v] = sum_{t: id_t = v} grad_t; the row `padding_idx` gets none, as in autograd.

    Raises:
        UnsupportedModelError: the gradient of a row depends on other rows of the batch.
    """
    module = call.module
    assert isinstance(module, nn.Embedding)
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise UnsupportedModelError("Embedding with scale_grad_by_freq or max_norm has no per-sequence gradient.")
    index = call.input.reshape(call.input.shape[0], -1)
    right = _tokens(grad)
    if module.padding_idx is not None:
        right = right.masked_fill((index == module.padding_idx)[..., None], 0)
    return {"weight": Outer(index, right, rows=module.num_embeddings)}


@register_rule(nn.RMSNorm, "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
def rms_norm(call: Call, grad: Tensor) -> dict[str, Contribution]:
    """Y = w * x/rms(x): G_w = sum_t grad_t * y_t / w, with the normalised input taken from the output."""
    gain = call.module.weight
    assert isinstance(gain, Tensor)
    if gain.abs().amin() < torch.finfo(gain.dtype).tiny ** 0.5:  # y / w is lost to underflow: normalise again
        normalised, gain = _with_unit_gain(call), torch.ones_like(gain)
    else:
        normalised = call.output
    shape, wide = (grad.shape[0], -1, *gain.shape), torch.promote_types(grad.dtype, torch.float32)
    product = (grad.to(wide) * normalised).reshape(shape).sum(1)
    return {"weight": Vector((product / gain).flatten(1))}


def _with_unit_gain(call: Call) -> Tensor:
    """The norm's output for weight 1, from the module's own forward and so with its own eps and casts."""
    gain = call.module._parameters["weight"]
    assert gain is not None
    call.module._parameters["weight"] = torch.ones_like(gain)  # type: ignore[assignment]
    try:
        with torch.no_grad():
            return call.module.forward(call.input)  # type: ignore[no-any-return]
    finally:
        call.module._parameters["weight"] = gain


def _tokens(activation: Tensor) -> Tensor:
    """(S, ..., d) as (S, T, d) in float32 or wider: every position but the batch row counts as a token."""
    wide = activation.to(torch.promote_types(activation.dtype, torch.float32))
    return wide.reshape(activation.shape[0], -1, activation.shape[-1])
