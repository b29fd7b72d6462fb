"""The general way: every sequence's gradient of parameters without a rule, from one operation.

An operation y = f(x, w), where w is computed from parameters alone (`DerivedTensor`), gives the gradient of w by vmap
over rows of its vector-Jacobian product, and that of the parameters through what w was computed by. A product with a
whole weight, or a lookup in one, keeps its factors instead (`factors_of`). `tapped_operations` finds the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import embedding, linear
from torch.utils._pytree import TreeSpec, tree_unflatten

from oblrpo.scores.contributions import CHUNK_ELEMENTS, Contribution, Vector, wide
from oblrpo.scores.functions import name_of
from oblrpo.scores.rules import Gradients, LayerCall, UnsupportedModelError, lookup, product
from oblrpo.scores.trainable_layers import TrainableLayer

_PRODUCTS = {linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"}
_TRANSPOSES = {"t", "T", "mT", "transpose"}


class ParameterInPlace(NamedTuple):
    """A parameter as it is in place now, under FSDP the gathered one, and whose it is."""

    layer: TrainableLayer
    name: str
    in_place: Tensor

    @property
    def path(self) -> str:
        """Its path in the model."""
        return f"{self.layer.name}.{self.name}"

    @property
    def kind(self) -> str:
        """The class of its layer."""
        return type(self.layer.module).__name__


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor computed from parameters and constants alone."""

    tensor: Tensor
    sources: tuple[ParameterInPlace, ...]
    transposed: bool | None
    """False: it is its only source, but for a cast; True: its transpose; None: something else."""
    version: int

    def once(self, rows: int) -> Tensor:
        """The tensor; of one that was expanded to all rows, the first."""
        expanded = rows > 1 and self.tensor.ndim > 1 and self.tensor.shape[0] == rows and self.tensor.stride(0) == 0
        return self.tensor[:1] if expanded else self.tensor


@dataclass(frozen=True)
class Operation:
    """One call of a torch function on derived tensors and activations, with what it takes to make it again by rows."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    derived: dict[int, DerivedTensor]
    """By the place among the leaves."""
    in_rows: list[int]
    """Places of the leaves that have a leading row axis."""
    rows: int
    autocast: Callable[[], AbstractContextManager[Any]]
    constants: list[int]
    """Places of the other tensors."""

    def call(self, changed: dict[int, Any]) -> Any:
        """The function, with these leaves in the place of the recorded ones."""
        leaves = [changed.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    @property
    def sources(self) -> dict[str, ParameterInPlace]:
        """The parameters behind it, by path."""
        return {source.path: source for derived in self.derived.values() for source in derived.sources}

    def refuse_large(self, limit: int) -> None:
        """Refuse parameters, and what was made of them, of more numbers than may be held for each sequence."""
        for source in self.sources.values():
            if source.in_place.numel() > limit:
                raise UnsupportedModelError(
                    f"{source.path}: no score-norm rule for {source.kind}, and with "
                    f"{source.in_place.numel()} numbers it is too large to hold a gradient per sequence; freeze it or "
                    "add a rule with oblrpo.scores.register_rule."
                )
        for derived in self.derived.values():
            if (numbers := derived.once(self.rows).numel()) > limit:
                raise UnsupportedModelError(
                    f"{derived.sources[0].path}: what is made of it has {numbers} numbers, too many to hold a gradient "
                    "a sequence, and there is no rule for it; freeze it, or adapt the module and not its parameter."
                )

    def last_row(self) -> Tensor | None:
        """The output of the last row alone, or None if the function does not take it alone."""
        changed: dict[int, Any] = {
            place: self.leaves[place][-(self.leaves[place].shape[0] // self.rows) :] for place in self.in_rows
        }
        changed |= {place: derived.once(self.rows).detach() for place, derived in self.derived.items()}
        try:
            with torch.no_grad():
                output = self.call(changed)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
        return output if isinstance(output, Tensor) else None

    def let_go(self) -> None:
        """Let go of the activations, which would live on with their graphs."""
        for place in (*self.in_rows, *self.constants):
            self.leaves[place] = None

    def gradients(self, saved: list[Tensor], grad: Tensor) -> dict[str, Contribution]:
        """Every sequence's gradient of every parameter behind the operation, from its rows and output gradient."""
        S, places = self.rows, list(self.derived)
        for derived in self.derived.values():
            if derived.tensor._version != derived.version:
                raise UnsupportedModelError(
                    f"{derived.sources[0].path}: what was made of it was changed in place after its use."
                )
        in_rows = [activation.unflatten(0, (S, -1)) for activation in saved[: len(self.in_rows)]]
        fixed = dict(zip(self.constants, map(_wide, saved[len(self.in_rows) :]), strict=True))
        with torch.enable_grad():
            used = [derived.once(S) for derived in self.derived.values()]
        weights = [_wide(tensor.detach()) for tensor in used]

        def one_row(grad: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
            given: dict[int, Any] = fixed | dict(zip(self.in_rows, map(_wide, row), strict=True))
            output, pull, *_ = vjp(
                lambda *weights: self.call(given | dict(zip(places, weights, strict=True))), *weights
            )
            return pull(grad.to(output.dtype))  # type: ignore[no-any-return]

        with self.autocast():
            per_row = _over_rows(one_row, [grad.unflatten(0, (S, -1)), *in_rows], sum(w.numel() for w in weights))
        # From the derived tensors on to the parameters.
        sources = self.sources
        given = [grad_S.to(tensor.dtype) for tensor, grad_S in zip(used, per_row, strict=True)]
        parameters = [source.in_place for source in sources.values()]
        if [id(tensor) for tensor in used] == [id(tensor) for tensor in parameters]:
            grads: list[Tensor] = given
        else:
            zeros = [parameter.new_zeros(self.rows, *parameter.shape) for parameter in parameters]
            passed = torch.autograd.grad(
                used, parameters, given, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            grads = [zero if grad is None else grad for zero, grad in zip(zeros, passed, strict=True)]
        return {path: Vector(wide(grad).reshape(self.rows, -1)) for path, grad in zip(sources, grads, strict=True)}


def _over_rows(one_row: Callable[..., tuple[Tensor, ...]], rows: list[Tensor], elements: int) -> list[Tensor]:
    """What the function gives for every row, stacked: by vmap, or one after the other where vmap does not know how."""
    size = max(1, CHUNK_ELEMENTS // max(1, elements + rows[0][0].numel()))
    try:
        return list(vmap(one_row, chunk_size=size)(*rows))
    except RuntimeError:
        results = [one_row(*row) for row in zip(*rows, strict=True)]
        return [torch.stack(grads) for grads in zip(*results, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return wide(tensor) if tensor.is_floating_point() else tensor


def alias(func: Any, result: Tensor, derived: list[DerivedTensor]) -> bool | None:
    """Whether a result is still its only source, or its transpose, as `DerivedTensor.transposed` says."""
    (first, *others), name = derived, name_of(func)
    if others or first.transposed is None or len(first.sources) != 1:
        return None
    if name in _CASTS and result.shape == first.tensor.shape:
        return first.transposed
    if name in _TRANSPOSES and result.ndim == 2 and result.shape == first.tensor.shape[::-1]:
        return (not first.transposed) if result.stride() == first.tensor.stride()[::-1] else first.transposed
    return None


Factored: TypeAlias = tuple[Gradients, dict[str, ParameterInPlace], Tensor]
"""What the tap of such an operation needs: its rule, its parameters by the names of the parts, and its input."""


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
    return (product, sources, input) if len(operation.derived) == len(sources) else None


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

    def rule(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
        return {"weight": lookup(call.input, grad, len(source.in_place), padding)}

    return rule, {"weight": source}, given["input"]
