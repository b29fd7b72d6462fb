"""Products with a whole weight and lookups in it, among operations without a rule: they keep their factors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from oblrpo.scores.contributions import Contribution, Outer
from oblrpo.scores.operations import Operation, ParameterInPlace
from oblrpo.scores.rules import Gradients, LayerCall, UnsupportedModelError, product


class Factored(NamedTuple):
    """What the tap of such an operation needs: its rule, its parameters by the names of the parts, and its input."""

    gradients: Gradients
    sources: dict[str, ParameterInPlace]
    input: Tensor


def factors_of(operation: Operation, args: Any, kwargs: Any, tokens: int) -> Factored | None:
    """The factors of a product with a whole weight, or of a lookup in one; None if it is neither."""
    func, derived = operation.function, {id(weight.tensor): weight for weight in operation.derived.values()}
    if func is embedding:
        return _lookup(operation, args, kwargs)
    if func not in _PRODUCTS or set(kwargs) - {"bias"} or len(args) < 2:
        return None
    input, weight, bias = args[0], derived.get(id(args[1])), derived.get(id([*args[2:], *kwargs.values(), None][0]))
    leads = input.shape[0] == operation.rows or (input.ndim == 2 and input.shape[0] == operation.rows * tokens)
    if weight is None or weight.transposed is None or weight.tensor.ndim != 2 or not leads or input.ndim < 2:
        return None
    sources = {"transposed" if weight.transposed is (func is linear) else "weight": weight.sources[0]}
    if bias is not None:
        if bias.transposed is None:
            return None
        sources["bias"] = bias.sources[0]
    return Factored(product, sources, input) if len(operation.derived) == len(sources) else None


def _lookup(operation: Operation, args: Any, kwargs: Any) -> Factored | None:
    """A lookup in a whole weight."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args, strict=False)) | kwargs
    weight = next((derived for derived in operation.derived.values() if derived.tensor is given["weight"]), None)
    if weight is None or weight.transposed is not False or given["input"].shape[0] != operation.rows:
        return None
    source, padding = weight.sources[0], given.get("padding_idx")
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        raise UnsupportedModelError(f"{source.path}: no per-sequence gradient with max_norm or scale_grad_by_freq.")
    vocabulary = len(source.in_place)

    def rule(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
        index_ST, right = call.input.reshape(len(call.input), -1), grad.reshape(grad.shape[0], -1, grad.shape[-1])
        if padding is not None:
            right = right.masked_fill((index_ST == padding % vocabulary)[..., None], 0)
        return {"weight": Outer(index_ST, right, vocabulary)}

    return Factored(rule, {"weight": source}, given["input"])


_PRODUCTS = {linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
