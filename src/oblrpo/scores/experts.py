"""Recorded forwards of batched expert weights, which act inside on tokens that are gathered from all rows.

`forward_for(module)` gives a function `(module, tap, *args, **kwargs)` that computes what the module's forward does and
passes every use of a parameter through `tap(names, input, output, ...)`, which returns the output to continue with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from oblrpo.scores.rules import UnsupportedModelError


@dataclass(frozen=True)
class Dispatch:
    """Which slice of a batched weight saw which tokens."""

    index: int
    """Index of the expert."""
    token_N: Tensor
    """Positions of the expert's tokens, (N,)."""
    tokens: int
    """Number of flattened tokens that the positions count in."""


ProductTap: TypeAlias = Callable[[dict[str, str], Tensor, Tensor, Dispatch], Tensor]
"""Records output = input W' + b for the slices, dispatched to, of the parameters that are named {"weight": W} or
{"transposed": W'} and {"bias": b}; returns the output to continue with."""

Forward: TypeAlias = Callable[..., Any]


def forward_for(path: str, module: nn.Module) -> Forward | None:
    """The recorded forward for the module at this path, or None if it is no batched experts.

    transformers' batched experts give y = sum_k p_k D[e_k] (act(gate) * up), [gate, up] = U[e_k] x. Weights may be
    transposed, products may have biases, and there may be no gate. Llama 4's have one form.

    Raises:
        UnsupportedModelError: the layer has a norm, further parameters, or is split over devices.
    """
    if not is_experts(module):
        return None
    if type(module).__name__ == "Llama4TextExperts":
        return _all_experts
    settings = {name: getattr(module, name, False) for name in ("has_post_expert_norm", "_is_expert_parallel")}
    odd = [f"{name} is {value}" for name, value in settings.items() if value]
    first, biased = _first(module), "_bias" if getattr(module, "has_bias", False) else ""
    expected = sorted({first, "down_proj", first + biased, "down_proj" + biased})
    parameters = sorted(dict(module.named_parameters(recurse=False)))
    if parameters != expected:
        odd.append(f"its parameters are {', '.join(parameters)}, not {', '.join(expected)}")
    if module.has_gate and not hasattr(module, "_apply_gate"):
        odd.append("it has no method _apply_gate")
    if odd:
        raise UnsupportedModelError(
            f"{path}: {type(module).__name__} is not a batched-experts layer of a known form: {'; '.join(odd)}."
        )
    return _experts


def keeps_tokens_apart(module: nn.Module) -> bool:
    """Whether the module is known to give every token what it gives that token alone, by whatever ways inside."""
    return is_experts(module) or type(module).__name__ == "Llama4TextMoe"


def is_experts(module: nn.Module) -> bool:
    """Whether the module is one of transformers' batched experts."""
    name = type(module).__name__
    return name == "Llama4TextExperts" or (name.endswith("Experts") and hasattr(module, "has_gate"))


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _product(module: Any, tap: ProductTap, name: str, x: Tensor, dispatch: Dispatch) -> Tensor:
    """One expert's product, with its bias where there are any."""
    weight, names = getattr(module, name)[dispatch.index], {"weight": name}
    if getattr(module, "is_transposed", True):
        weight, names = weight.T, {"transposed": name}
    bias = None
    if getattr(module, "has_bias", False):
        names["bias"] = f"{name}_bias"
        bias = getattr(module, names["bias"])[dispatch.index]
    return tap(names, x, linear(x, weight, bias), dispatch)


def _experts(module: Any, tap: ProductTap, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward with its tokens sorted by expert, and one pair of products an expert."""
    first, experts, tokens = _first(module), len(module.down_proj), len(hidden_states)
    expert_N, order_N = top_k_index.flatten().sort(stable=True)
    token_N = order_N // top_k_index.shape[1]
    ends = torch.bincount(expert_N, minlength=experts).cumsum(0).tolist()
    mixed = torch.zeros_like(hidden_states)
    for expert, (start, end) in enumerate(zip([0, *ends], ends[:experts], strict=False)):
        if start == end:
            continue
        token = token_N[start:end]
        dispatch = Dispatch(expert, token, tokens)
        y = _product(module, tap, first, hidden_states[token], dispatch)
        y = module._apply_gate(y) if first == "gate_up_proj" else module.act_fn(y)
        y = _product(module, tap, "down_proj", y, dispatch)
        y = y * top_k_weights.flatten()[order_N[start:end], None]
        mixed = mixed.index_add(0, token, y.to(mixed.dtype))
    return mixed


def _all_experts(module: Any, tap: ProductTap, hidden_states: Tensor) -> Tensor:
    """Llama 4's: every expert sees every token, and what comes in is sorted by expert."""
    by_expert = hidden_states.view(len(module.down_proj), -1, hidden_states.shape[-1])
    tokens, outputs = by_expert.shape[1], []
    for expert, x in enumerate(by_expert):
        dispatch = Dispatch(expert, torch.arange(tokens, device=x.device), tokens)
        gate, up = _product(module, tap, "gate_up_proj", x, dispatch).chunk(2, dim=-1)
        outputs.append(_product(module, tap, "down_proj", up * module.act_fn(gate), dispatch))
    return torch.cat(outputs)
