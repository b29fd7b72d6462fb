"""Recorded forwards of layers whose parameters act inside: mixture-of-experts routers and batched expert weights.

`forward_for(module)` gives a function `(module, tap, *args, **kwargs)` that computes what the module's forward does and
passes every use of a parameter through `tap(name, input, output, ...)`, which returns the output to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

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


Tap: TypeAlias = Callable[[str, Tensor, Tensor, Dispatch | None], Tensor]
"""Records output = input W' for the parameter named, or the slice dispatched to; returns the output to go on with."""

Forward: TypeAlias = Callable[..., Any]


def forward_for(path: str, module: nn.Module, trainable: frozenset[str]) -> Forward | None:
    """The recorded forward for the module at this path, whose `trainable` parameters count, or None.

    Raises:
        UnsupportedModelError: a batched-experts layer of a form that is not known here.
    """
    name = type(module).__name__
    if name.endswith("TopKRouter"):
        return partial(linear_uses, path, trainable)
    if name.endswith("Experts"):
        return experts_forward(path, module)
    return None


def linear_uses(path: str, trainable: frozenset[str], module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with each `linear(x, self.weight)` in it recorded.

    Raises:
        UnsupportedModelError: a trainable parameter is used in some other way.
    """
    with _LinearUses(path, trainable, module, tap):
        return type(module).forward(module, *args, **kwargs)


class _LinearUses(TorchFunctionMode):
    def __init__(self, path: str, trainable: frozenset[str], module: nn.Module, tap: Tap) -> None:
        super().__init__()
        self.path, self.module, self.tap = path, module, tap
        self.names = {id(module._parameters[name]): name for name in trainable}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        used = [self.names[id(each)] for each in _flat([*args, *kwargs.values()]) if id(each) in self.names]
        if not used or not any(isinstance(each, Tensor) for each in _flat([result])):  # a shape, a type
            return result
        if func is linear and len(used) == 1 and len(args) > 1 and id(args[1]) in self.names:
            return self.tap(used[0], args[0], result, None)
        raise UnsupportedModelError(
            f"{self.path}: {type(self.module).__name__} uses {used[0]} in {getattr(func, '__name__', func)}; only "
            "linear(x, weight) with the whole weight is known of a router."
        )


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """What lists and tuples hold, however deep (`torch.cat` takes a list, `chunk` gives a tuple)."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def experts_forward(path: str, module: nn.Module) -> Forward:
    """The forward of transformers' batched experts: y = sum_k p_k D[e_k] (act(gate) * up), [gate, up] = U[e_k] x.

    Raises:
        UnsupportedModelError: the layer has biases, transposed weights, no gate, a norm, or is split over devices.
    """
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False,
              "_is_expert_parallel": False}  # fmt: skip
    settings = {name: getattr(module, name, value) for name, value in wanted.items()}
    odd = [f"{name} is {value}" for name, value in settings.items() if value is not wanted[name]]
    parameters = sorted(dict(module.named_parameters(recurse=False)))
    if parameters != ["down_proj", "gate_up_proj"]:
        odd.append(f"its parameters are {', '.join(parameters)}, not down_proj and gate_up_proj")
    if not hasattr(module, "_apply_gate"):
        odd.append("it has no method _apply_gate")
    if odd:
        raise UnsupportedModelError(
            f"{path}: {type(module).__name__} is no batched-experts layer of the form that is known: {'; '.join(odd)}."
        )
    return _experts


def _experts(module: Any, tap: Tap, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward with its tokens sorted by expert, and one pair of products an expert."""
    experts, tokens = module.gate_up_proj.shape[0], len(hidden_states)
    expert_N, order_N = top_k_index.flatten().sort(stable=True)
    token_N = order_N // top_k_index.shape[1]
    ends = torch.bincount(expert_N, minlength=experts).cumsum(0).tolist()
    mixed = torch.zeros_like(hidden_states)
    for expert, (start, end) in enumerate(zip([0, *ends], ends[:experts], strict=False)):
        if start == end:
            continue
        token = token_N[start:end]
        dispatch = Dispatch(expert, token, tokens)
        x = hidden_states[token]
        gate_up = tap("gate_up_proj", x, linear(x, module.gate_up_proj[expert]), dispatch)
        y = module._apply_gate(gate_up)
        y = tap("down_proj", y, linear(y, module.down_proj[expert]), dispatch)
        y = y * top_k_weights.flatten()[order_N[start:end], None]
        mixed = mixed.index_add(0, token, y.to(mixed.dtype))
    return mixed
