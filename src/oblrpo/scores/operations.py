"""The general way: parameters without a rule, by the single operations in which they meet activations.

While such a module runs, every torch function is seen. What is computed from parameters and constants alone is followed
(`-exp(A_log.float())`, a weight that is cast or transposed, a table that is expanded). Where it meets activations, it is
cut off from autograd and the output is tapped: each sequence's gradient of that one operation is taken by vmap over rows
of its vector-Jacobian product, and passed on to the parameters through what was followed. Products with a whole weight
and lookups in it keep their factors instead. Whatever this does not see leaves the parameter in autograd's graph, where
`Recorder.backward` finds it and refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from oblrpo.scores.contributions import CHUNK_ELEMENTS, Contribution, Outer, Vector, wide
from oblrpo.scores.owners import Owner
from oblrpo.scores.rules import Call, Gradients, UnsupportedModelError, product

SMALL_SHARE, SMALL_NUMBERS = 0.01, 1 << 16
"""Per-sequence gradients are held of parameters of up to this share of the model's, or of so many numbers."""


class Source(NamedTuple):
    """A parameter as it is in place now, under FSDP the gathered one, and whose it is."""

    owner: Owner
    name: str
    in_place: Tensor

    @property
    def path(self) -> str:
        """Its path in the model."""
        return f"{self.owner.name}.{self.name}"


@dataclass(frozen=True)
class Derived:
    """A tensor computed from parameters and constants alone."""

    tensor: Tensor
    sources: tuple[Source, ...]
    transposed: bool | None
    """False: it is its only source, but for a cast; True: its transpose; None: something else."""

    @cached_property
    def constant(self) -> Tensor:
        """The tensor, cut off from autograd."""
        return self.tensor.detach()

    def shared(self, rows: int) -> slice:
        """Of a tensor that was expanded to all rows, the first; else the whole."""
        expanded = rows > 1 and self.tensor.ndim > 1 and self.tensor.shape[0] == rows and self.tensor.stride(0) == 0
        return slice(0, 1) if expanded else slice(None)


@dataclass(frozen=True)
class Operation:
    """One call of a torch function on derived tensors and activations, with what it takes to make it again by rows."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    derived: dict[int, Derived]
    """By the place among the leaves."""
    in_rows: list[int]
    """Places of the leaves that have a leading row axis."""
    rows: int
    autocast: Callable[[], AbstractContextManager[Any]]
    constants: list[int] = field(default_factory=list)
    """Places of the other tensors."""

    def call(self, changed: dict[int, Any]) -> Any:
        """The function, with these leaves in the place of the recorded ones."""
        leaves = [changed.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    @property
    def sources(self) -> dict[str, Source]:
        """The parameters behind it, by path."""
        return {source.path: source for each in self.derived.values() for source in each.sources}

    def last_row(self) -> Tensor | None:
        """The output of the last row alone, or None if the function does not take it alone."""
        changed: dict[int, Any] = {
            place: self.leaves[place][-(self.leaves[place].shape[0] // self.rows) :] for place in self.in_rows
        }
        for place, each in self.derived.items():
            changed[place] = each.constant[each.shared(self.rows)] if each.constant.ndim else each.constant
        try:
            with torch.no_grad():
                output = self.call(changed)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
        return output if isinstance(output, Tensor) else None

    def fits(self, output: Tensor) -> bool:
        """Whether the last row alone has the shape of the last row of the output."""
        alone = self.last_row()
        if alone is None or not output.ndim or output.shape[0] % self.rows:
            return False
        return alone.shape == output[-(output.shape[0] // self.rows) :].shape

    def let_go(self) -> None:
        """Let go of the activations, which would live on with their graphs."""
        for place in (*self.in_rows, *self.constants):
            self.leaves[place] = None

    def gradients(self, saved: list[Tensor], grad: Tensor) -> dict[str, Contribution]:
        """Every sequence's gradient of every parameter behind the operation, from its rows and output gradient."""
        S, places = self.rows, list(self.derived)
        in_rows = [each.unflatten(0, (S, -1)) for each in saved[: len(self.in_rows)]]
        fixed = dict(zip(self.constants, map(_wide, saved[len(self.in_rows) :]), strict=True))
        used = []
        with torch.enable_grad():
            for each in self.derived.values():
                used.append(each.tensor[each.shared(S)] if each.shared(S) != slice(None) else each.tensor)
        weights = [_wide(each.detach()) for each in used]

        def one_row(grad: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
            given: dict[int, Any] = fixed | dict(zip(self.in_rows, map(_wide, row), strict=True))
            output, pull = vjp(lambda *weights: self.call(given | dict(zip(places, weights, strict=True))), *weights)
            return pull(grad.to(output.dtype))  # type: ignore[no-any-return]

        with self.autocast():
            per_row = _over_rows(one_row, [grad.unflatten(0, (S, -1)), *in_rows], sum(w.numel() for w in weights))
        return self._pass_on(used, per_row)

    def _pass_on(self, used: list[Tensor], grads_S: Iterable[Tensor]) -> dict[str, Contribution]:
        """Gradients of the derived tensors as gradients of the parameters."""
        sources = self.sources
        given = [grad_S.to(each.dtype) for each, grad_S in zip(used, grads_S, strict=True)]
        if all(each is source.in_place for each, source in zip(used, sources.values(), strict=False)):
            total = dict(zip(sources, given, strict=False)) if len(used) == len(sources) else None
        else:
            total = None
        if total is None:
            parameters = [source.in_place for source in sources.values()]
            found = torch.autograd.grad(
                used, parameters, given, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            total = {
                path: source.in_place.new_zeros(self.rows, *source.in_place.shape) if each is None else each
                for (path, source), each in zip(sources.items(), found, strict=True)
            }
        return {path: Vector(wide(each).reshape(self.rows, -1)) for path, each in total.items()}


def _over_rows(one_row: Callable[..., tuple[Tensor, ...]], rows: list[Tensor], elements: int) -> list[Tensor]:
    """What the function gives for every row, stacked: by vmap, or one after the other where vmap does not know how."""
    size = max(1, CHUNK_ELEMENTS // max(1, elements + rows[0][0].numel()))
    try:
        return list(vmap(one_row, chunk_size=size)(*rows))
    except RuntimeError:
        results = [one_row(*row) for row in zip(*rows, strict=True)]
        return [torch.stack(each) for each in zip(*results, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return wide(tensor) if tensor.is_floating_point() else tensor


class Record(NamedTuple):
    """What an operation's tap needs of the recorder."""

    rows: Callable[[], int | None]
    tokens: Callable[[], int | None]
    tap: Callable[[Owner, Gradients, dict[str, Source], Tensor, list[Tensor], Operation | None], Tensor]


class Operations(TorchFunctionMode):
    """Sees the torch functions of modules without a rule, and taps those where parameters meet activations."""

    def __init__(self, record: Record, model_numbers: int) -> None:
        super().__init__()
        self._record = record
        self._limit = max(SMALL_NUMBERS, int(SMALL_SHARE * model_numbers))
        self._derived: dict[int, Derived] = {}
        self._depth = 0
        self._doubts: list[tuple[str, Tensor]] = []

    def forget(self) -> None:
        """Forget the last forward."""
        self._derived, self._depth, self._doubts = {}, 0, []

    @contextmanager
    def of(self, owners: list[Owner]) -> Iterator[None]:
        """See what is done with the parameters of these."""
        for owner in owners:
            for name in owner.parameters:
                in_place = owner.module._parameters[name]
                assert in_place is not None
                self._derived[id(in_place)] = Derived(in_place, (Source(owner, name, in_place),), False)
        self._depth += 1
        try:
            if self._depth == 1:
                with self:
                    yield
            else:
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._derived = {}

    def check(self) -> None:
        """Look whether every operation gave for one row alone what it gave for it in the batch.

        Raises:
            UnsupportedModelError: one did not.
        """
        doubts, self._doubts = self._doubts, []
        if doubts and bool(torch.stack([wrong.cpu() for _, wrong in doubts]).any()):
            what = next(what for what, wrong in doubts if bool(wrong))
            raise UnsupportedModelError(
                f"{what} gives a row of the batch something else than it gives that row alone: rows mix, or it is random."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self._derived
        if not torch.is_grad_enabled() or not any(id(each) in known for each in _flat([*args, *kwargs.values()])):
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        derived = {place: known[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in known}
        others = [p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and p not in derived]
        operation, output = self._in_rows(func, leaves, spec, derived, others)
        if operation is None:
            return self._follow(func, args, kwargs, derived)
        try:
            return self._meet(operation, output, args, kwargs)
        finally:
            operation.let_go()

    def _in_rows(
        self, func: Any, leaves: list[Any], spec: TreeSpec, derived: dict[int, Derived], others: list[int]
    ) -> tuple[Operation | None, Any]:
        """The operation and its output, if it takes activations: what autograd follows, or what leads with the batch's rows.

        Raises:
            UnsupportedModelError: an activation has no leading row axis.
        """
        rows = self._record.rows()
        if rows is None:
            rows = next((leaves[p].shape[0] for p in others if leaves[p].ndim > 1), 1)
        followed = [p for p in others if leaves[p].requires_grad]
        in_rows = [p for p in others if leaves[p].ndim and leaves[p].shape[0] and leaves[p].shape[0] % rows == 0]
        odd = [p for p in followed if p not in in_rows]
        if odd:
            path = next(iter(derived.values())).sources[0].path
            raise UnsupportedModelError(
                f"{path}: it meets an activation of shape {tuple(leaves[odd[0]].shape)} in {_name(func)}, which does not "
                f"lead with the batch's {rows} rows; there is no rule for {_kind(derived)}."
            )
        if not in_rows or (not followed and not _is_pure(func)):
            return None, None
        output: Any = None
        for chosen in (in_rows, followed) if followed else (in_rows,):
            constants = [p for p in others if p not in chosen]
            operation = Operation(func, leaves, spec, derived, chosen, rows, _autocast(leaves[chosen[0]]), constants)
            if output is None:
                output = operation.call({place: each.constant for place, each in derived.items()})
            if rows == 1 or not isinstance(output, Tensor) or operation.fits(output) or chosen == followed:
                return operation, output
        return None, None

    def _follow(self, func: Any, args: Any, kwargs: Any, derived: dict[int, Derived]) -> Any:
        """Run a function of derived tensors and constants alone, and remember what it gives."""
        result = func(*args, **kwargs)
        sources = tuple({source.path: source for each in derived.values() for source in each.sources}.values())
        written = [args[0]] if result is None and args else []
        for each in _flat([result, *written]):
            if isinstance(each, Tensor) and each.requires_grad:
                self._derived[id(each)] = Derived(each, sources, _alias(func, each, list(derived.values())))
        return result

    def _meet(self, operation: Operation, output: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of derived tensors and activations, its output tapped."""
        func, derived = operation.function, operation.derived
        path = next(iter(derived.values())).sources[0].path
        if isinstance(output, Tensor) and not output.is_floating_point():
            return output
        if not isinstance(output, Tensor) or not _is_pure(func) or not output.ndim or output.shape[0] % operation.rows:
            if not any(isinstance(each, Tensor) for each in _flat([output])) and output is not None:
                return output
            raise UnsupportedModelError(
                f"{path}: it is used in {_name(func)}, which changes a tensor in place, gives several or none with the "
                f"batch's leading axis; there is no rule for {_kind(derived)}."
            )
        factored = self._factors(operation, args, kwargs, output)
        if factored is not None:
            return factored
        self._doubt(f"{path}: {_name(func)}", operation, output)
        for source in operation.sources.values():
            if source.in_place.numel() > self._limit:
                raise UnsupportedModelError(
                    f"{source.path}: no score-norm rule for {type(source.owner.module).__name__}, and with "
                    f"{source.in_place.numel()} numbers it is too large for per-sequence gradients of its own; freeze it "
                    "or add a rule with oblrpo.scores.register_rule."
                )
        saved = [operation.leaves[place] for place in (*operation.in_rows, *operation.constants)]
        owner = next(iter(derived.values())).sources[0].owner
        return self._record.tap(owner, product, operation.sources, output, saved, operation)

    def _doubt(self, what: str, operation: Operation, output: Tensor) -> None:
        """Note whether the last row alone gives something else; looked at in `check`, so that a GPU need not wait."""
        if operation.rows == 1:
            return
        alone, batch = operation.last_row(), output.detach()[-(output.shape[0] // operation.rows) :]
        if alone is None or alone.shape != batch.shape:
            raise UnsupportedModelError(f"{what} cannot be taken for one row alone; do rows mix?")
        scale = batch.nan_to_num(posinf=0.0, neginf=0.0).abs().amax() * torch.finfo(batch.dtype).eps ** 0.5
        same = (alone == batch) | ((alone - batch).abs() <= scale) | (alone.isnan() & batch.isnan())
        self._doubts.append((what, ~same.all()))

    def _factors(self, operation: Operation, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        """Tap a product with a whole weight, or a lookup in one, so that its factors are kept; None if it is neither."""
        func, derived = operation.function, operation.derived
        if func is torch.nn.functional.embedding:
            return self._lookup(operation, args, kwargs, output)
        if kwargs or func not in _PRODUCTS or len(args) != 2 or len(derived) != 1 or not isinstance(args[0], Tensor):
            return None
        input, (weight,) = args[0], derived.values()
        flat = input.ndim == 2 and input.shape[0] == operation.rows * (self._record.tokens() or 0)
        if weight.transposed is None or args[1] is not weight.tensor or not (input.shape[0] == operation.rows or flat):
            return None
        weight_left = weight.transposed is (func is torch.nn.functional.linear)
        role = "transposed" if weight_left else "weight"
        return self._record.tap(weight.sources[0].owner, product, {role: weight.sources[0]}, output, [input], None)

    def _lookup(self, operation: Operation, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = dict(zip(names, args, strict=False)) | kwargs
        weight = self._derived.get(id(given["weight"]))
        if weight is None or weight.transposed is not False or given["input"].shape[0] != operation.rows:
            return None
        source, padding = weight.sources[0], given.get("padding_idx")
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
            raise UnsupportedModelError(f"{source.path}: max_norm and scale_grad_by_freq have no per-sequence gradient.")
        vocabulary = len(source.in_place)

        def rule(call: Call, grad: Tensor) -> dict[str, Contribution]:
            index_ST, right = call.input.reshape(len(call.input), -1), _tokens(grad)
            if padding is not None:
                right = right.masked_fill((index_ST == padding % vocabulary)[..., None], 0)
            return {"weight": Outer(index_ST, right, vocabulary)}

        return self._record.tap(source.owner, rule, {"weight": source}, output, [given["input"]], None)


_PRODUCTS = {torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"}
_TRANSPOSES = {"t", "T", "mT", "transpose"}


def _alias(func: Any, result: Tensor, derived: list[Derived]) -> bool | None:
    """Whether a result is still its only source, or its transpose, as `Derived.transposed` says."""
    (first, *others), name = derived, _name(func)
    if others or first.transposed is None or len(first.sources) != 1:
        return None
    if name in _CASTS and result.shape == first.tensor.shape:
        return first.transposed
    if name in _TRANSPOSES and result.ndim == 2 and result.shape == first.tensor.shape[::-1]:
        return (not first.transposed) if result.stride() == first.tensor.stride()[::-1] else first.transposed
    return None


def _tokens(activation: Tensor) -> Tensor:
    return activation.reshape(activation.shape[0], -1, activation.shape[-1])


def _autocast(like: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast of now, to be entered again."""
    kind = like.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def _is_pure(func: Any) -> bool:
    """Whether the function leaves its arguments as they are, by its name."""
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return not in_place and not (name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"}) and (
        name not in {"__setitem__", "__delitem__"}
    )


def _name(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _kind(derived: dict[int, Derived]) -> str:
    return type(next(iter(derived.values())).sources[0].owner.module).__name__


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """What lists and tuples hold, however deep (`torch.cat` takes a list)."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
