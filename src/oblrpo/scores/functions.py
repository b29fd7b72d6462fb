"""What torch functions do, by their names: write in place, and keep the rows of a batch apart.

`keeps_rows` looks at one call. Its activations and its result must lead with the batch's rows, or with blocks of them
(rows and their tokens, rows and heads). The function must be on one of the lists here, and be used along another axis
than the first. An index along the rows, a sum over them, a transposition of them may be harmless. It may also bring
rows together that other data would keep apart. So where a function is not listed, every record checks the rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


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


def keeps_rows(func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor], rows: int) -> bool:
    """Whether every row of a call's result comes from the same row of those given that autograd follows."""
    followed = [tensor for tensor in flat([result]) if isinstance(tensor, Tensor) and tensor.requires_grad]
    if not followed or not given:  # no gradient passes
        return True
    if not all(_leads(tensor, rows) for tensor in (*given, *followed)):
        return False
    name = name_of(func).strip("_")
    if name[:1] in {"i", "r"} and name[1:] in _RULES and name not in _RULES and name != "rmatmul":
        name = name[1:]  # __iadd__, __radd__
    rule = _RULES.get(name)
    if rule is None or (name not in _RESHAPES and {tensor.shape[0] for tensor in followed} != {given[0].shape[0]}):
        return False
    return rule(args, kwargs, given, followed[0])


def _leads(tensor: Tensor, rows: int) -> bool:
    """Whether the first axis may hold the rows, or as many of something of each."""
    return tensor.ndim > 0 and tensor.shape[0] > 0 and tensor.shape[0] % rows == 0


_RowRule = Callable[[Any, Any, list[Tensor], Tensor], bool]


def _aligned(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """Of a function of entries: no activation may be broadcast along the rows, nor moved to another axis."""
    return all(activation.ndim == result.ndim and activation.shape[0] == result.shape[0] for activation in given)


def _along(place: int, default: int | None = None, *, added: int = 0, name: str = "dim") -> _RowRule:
    """Of a function along the axes that the argument at this place, or of this name, gives: none may be the first.

    Where it is not given, the default is meant (None: all axes). Axes are counted in a result with so many axes added.
    """

    def rule(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
        axes = [*flat([kwargs[name]] if name in kwargs else args[place : place + 1])] or [default]
        numbers = all(isinstance(axis, int) and not isinstance(axis, bool) for axis in axes)
        same = len({(activation.ndim, activation.shape[0]) for activation in given}) == 1
        return numbers and same and all(axis % (given[0].ndim + added) != 0 for axis in axes)

    return rule


def _swapped(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """`transpose(x, 1, 2)`, `flip(x, 1, 2)`."""
    axes = [*flat([*args[1:], *kwargs.values()])]
    return bool(axes) and all(axis % given[0].ndim != 0 for axis in axes)


def _permuted(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    axes = [*flat([*args[1:], *kwargs.values()])]
    return bool(axes) and axes[0] % given[0].ndim == 0


def _expanded(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    return len(given) == 1 and given[0].ndim == result.ndim


def _joined(default: int, added: int) -> _RowRule:
    """`cat` and `stack`: of a single tensor nothing is joined."""
    along = _along(1, default, added=added)

    def rule(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
        parts = [*flat([args[0] if args else kwargs.get("tensors")])]
        alone = len(parts) == 1 and not added
        return alone or along(args, kwargs, given, result)

    return rule


def _product(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """A product x W keeps the rows of x; W x, and one of two activations, keep what is no axis of a matrix."""
    first, second = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
    left, right = any(first is activation for activation in given), any(second is activation for activation in given)
    batched = not right or (second.ndim >= 3 and second.ndim == result.ndim)
    return batched and (not left or (first.ndim == result.ndim and first.ndim >= (3 if right else 2)))


def _added_product(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """`addmm(b, x, W)`, `baddbmm`."""
    factors = [activation for activation in given if activation is not args[0]]
    return len(args) > 2 and _aligned(args, kwargs, given, result) and _product(args[1:3], {}, factors, result)


def _applied(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """`linear(x, W, b)`: of which only x may be an activation."""
    return len(given) == 1 and bool(args) and args[0] is given[0] and given[0].ndim == result.ndim >= 2


def _convolved(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """`conv1d(x, W)`, with the leading axis that makes it batched."""
    weight = args[1] if len(args) > 1 else kwargs["weight"]
    return _applied(args, kwargs, given, result) and bool(args[0].ndim == weight.ndim)


def _normalised(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    shape = [*flat([args[1] if len(args) > 1 else kwargs.get("normalized_shape", [])])]
    return bool(shape) and _applied(args, kwargs, given, result) and given[0].ndim > len(shape)


def _in_matrices(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """Of a function of matrices, each by itself or with those of its row."""
    return result.ndim >= 3 and _aligned(args, kwargs, given, result)


def _padded(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    widths = [*flat([args[1] if len(args) > 1 else kwargs.get("pad", ())])]
    return len(given) == 1 and bool(widths) and not any(widths[2 * given[0].ndim - 2 :])


def _summed(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """`einsum`: the first letter of every activation is that of the result, and stands nowhere else in them."""
    operands = [*flat(args[1:])]
    if not isinstance(args[0], str) or "->" not in args[0] or len(operands) != args[0].count(",") + 1:
        return False
    inputs, output = args[0].replace(" ", "").split("->")
    activations = {id(activation) for activation in given}
    terms = [term for term, operand in zip(inputs.split(","), operands, strict=True) if id(operand) in activations]
    row = output[:1]
    return row.isalpha() and all(term[:1] == row and term.count(row) == 1 for term in (*terms, output))


def _indexed(x: Tensor, index: Any) -> bool:
    """Whether an index takes all along the first axis, and moves no axis before it."""
    entries = [*index] if isinstance(index, tuple) else [index]
    axes = [entry for entry in entries if entry is not None and entry is not Ellipsis]
    tables = [entry for entry in axes if isinstance(entry, (Tensor, list))]
    if tables and len(tables) + sum(isinstance(entry, int) for entry in axes) > 1:
        return False  # their axis may be moved to the front
    used = sum(entry.ndim if isinstance(entry, Tensor) and entry.dtype is torch.bool else 1 for entry in axes)
    all_rows = isinstance(entries[0], slice) and entries[0] == slice(None)
    return all_rows or (entries[0] is Ellipsis and used < x.ndim)


def _written(args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> bool:
    """`x[index] = value`, where the value is a constant or leads with rows too."""
    target, index, _ = args
    values = [activation for activation in given if activation is not target]
    if not values or not _indexed(target, index):
        return not values
    place = target.detach()[index]
    return all(value.ndim == place.ndim and value.shape[0] == place.shape[0] == target.shape[0] for value in values)


_ENTRIES = """
    add sub mul div truediv true_divide multiply divide subtract neg negative pos pow float_power square sqrt rsqrt exp
    exp2 expm1 log log1p log2 log10 sigmoid tanh relu relu6 gelu silu mish softplus log_sigmoid softsign hardtanh
    hardswish hardsigmoid leaky_relu elu selu celu threshold prelu sin cos tan sinh cosh asin acos atan atan2 erf erfc
    erfinv reciprocal abs absolute clamp clip clamp_min clamp_max maximum minimum fmax fmin where masked_fill lerp
    addcmul addcdiv nan_to_num logaddexp xlogy copysign sign round floor ceil trunc fmod remainder sinc square
    to type type_as float double half bfloat16 clone contiguous copy dropout zero fill requires_grad real imag conj
    tril triu identity
"""
# A view that was made by functions of these lists has the rows of its `_base`, which FSDP asks for.
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "squeeze", "base"}
_RULES: dict[str, _RowRule] = {
    **dict.fromkeys(_ENTRIES.split(), _aligned),
    **dict.fromkeys(_RESHAPES, lambda *_: True),
    **dict.fromkeys(("view_as_real", "view_as_complex"), lambda *_: True),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logsumexp", "cumsum", "cumprod", "logcumsumexp"), _along(1)),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "cummax", "cummin"), _along(1)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _along(2)),
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add", "index_add", "index_fill"), _along(1)),
    **dict.fromkeys(("select", "narrow", "unfold"), _along(1)),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "flip"), _swapped),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), _along(2, 0)),
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined(0, 0)),
    **dict.fromkeys(("expand", "expand_as", "repeat", "broadcast_to"), _expanded),
    **dict.fromkeys(("matmul", "bmm", "mm"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    **dict.fromkeys(("conv1d", "conv2d"), _convolved),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
    **dict.fromkeys(("inverse", "linalg_inv", "linalg_solve_triangular", "mT"), _in_matrices),
    "normalize": _along(2, 1),
    "unsqueeze": _along(1, added=1),
    "unbind": _along(1, 0),
    "glu": _along(1, -1),
    "topk": _along(2, -1),
    "sort": _along(1, -1),
    "roll": _along(2, name="dims"),
    "repeat_interleave": _along(2),
    "take_along_dim": _along(2),
    "stack": _joined(0, 1),
    "permute": _permuted,
    "linear": _applied,
    "group_norm": _applied,
    "scaled_dot_product_attention": _in_matrices,
    "pad": _padded,
    "einsum": _summed,
    "getitem": lambda args, *_: _indexed(*args),
    "setitem": _written,
}
"""The functions, by their names without underscores."""
