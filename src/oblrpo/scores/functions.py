"""What torch functions do, by their names: leave their arguments as they are, pick rows, cast and transpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oblrpo.scores.operations import DerivedTensor


def _some_rows(args: Any, kwargs: Any) -> bool:
    """Whether an index picks along the leading axis."""
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    return isinstance(first, Tensor) or not (first is None or first is Ellipsis or first == slice(None))


def _along_rows(args: Any, kwargs: Any) -> bool:
    """Whether `split(x, sizes, dim=0)` and the like go along the leading axis."""
    return (kwargs.get("dim", args[2] if len(args) > 2 else 0)) in {0, -args[0].ndim}


def _entries_along_rows(args: Any, kwargs: Any) -> bool:
    """Whether `gather(x, dim=0, index)` or `take_along_dim(x, index, dim=0)` goes along the leading axis."""
    dims = [dim for dim in (*args[1:], kwargs.get("dim")) if isinstance(dim, int)]
    return not dims or dims[0] in {0, -args[0].ndim}


PICKING: dict[Any, Callable[[Any, Any], bool]] = {
    Tensor.__getitem__: _some_rows,
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), lambda args, kwargs: True),
    **dict.fromkeys((torch.index_select, Tensor.index_select), lambda args, kwargs: True),
    **dict.fromkeys((torch.gather, Tensor.gather), _entries_along_rows),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim), _entries_along_rows),
    **dict.fromkeys((torch.split, Tensor.split, torch.chunk, Tensor.chunk), _along_rows),
}
"""Functions that may take some rows, or tokens of some, and when they do."""

_CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"}
_TRANSPOSES = {"t", "T", "mT", "transpose"}


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


def out_of_place(func: Any) -> Callable[..., Any] | None:
    """What gives as a new tensor what an arithmetic method (`add_`, `__imul__`) writes in place, or None."""
    if is_pure(func):
        return None
    name = str(getattr(func, "__name__", ""))
    return getattr(Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1], None)


def is_pure(func: Any) -> bool:
    """Whether the function leaves its arguments as they are, by its name."""
    name = str(getattr(func, "__name__", ""))
    operator = name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"}
    in_place = name.endswith("_") and not name.endswith("__")
    return not (in_place or operator or name in {"__setitem__", "__delitem__"})


def name_of(func: Any) -> str:
    """The function's name, or that of the attribute it reads."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def random_state(like: Tensor) -> Tensor:
    """The state of the random numbers on the tensor's device."""
    if like.is_cuda:
        return torch.cuda.get_rng_state(like.device)
    return torch.random.get_rng_state()


def autocast(like: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast of now, to be entered again."""
    kind = like.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """What lists and tuples hold, however deep (`torch.cat` takes a list)."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value
