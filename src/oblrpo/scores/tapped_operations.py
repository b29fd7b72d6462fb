"""Sees the operations of modules without a rule, and taps those in which their parameters meet activations.

While such a module runs, every torch function is seen. What is computed from parameters and constants alone is followed
(`-exp(A_log.float())`, a weight that is cast or transposed, a table that is expanded). Where it meets activations, it
is cut off from autograd and the output is tapped (`operations`). Products with a whole weight and lookups in it keep
their factors instead. Whatever is not seen leaves the parameter in autograd's graph, where `ForwardRecorder.backward`
finds it and refuses.

The leading axis of an activation shows which rows of the batch it holds: the rows themselves, or with their tokens
flattened. Every operation is computed once more for the last row alone, which must give what it gives in the batch.
In the whole forward around these modules, the first function that is not known to keep rows apart (`functions`) is
noted: it picks tokens from several rows, say, of which any number might look like rows. Rows are then checked in this
record, too, however often they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten
from torch.utils.hooks import RemovableHandle

from oblrpo.scores.experts import is_experts, keeps_tokens_apart
from oblrpo.scores.functions import autocast, flat, is_pure, keeps_rows, name_of, out_of_place, random_state
from oblrpo.scores.operations import DerivedTensor, Operation, ParameterInPlace, alias, factors_of
from oblrpo.scores.rules import Gradients, UnsupportedModelError, product
from oblrpo.scores.trainable_layers import TrainableLayer, around, while_running

SMALL_SHARE, SMALL_NUMBERS = 0.01, 1 << 16
"""Per-sequence gradients are held of parameters of up to this share of the model's, or of so many numbers."""


Tap: TypeAlias = Callable[[Gradients, dict[str, ParameterInPlace], Tensor, list[Tensor], Operation | None], Tensor]
"""Taps an output whose parameters' gradients come by this rule from what is saved; returns the tapped output."""


class OperationTapper(TorchFunctionMode):
    """Sees the torch functions of modules without a rule, and taps those where parameters meet activations.

    Args:
        rows: the batch's rows in the present forward, or None where they are not known.
        tokens: the tokens of a row, or None.
        tap: taps an output.
        model_numbers: how many numbers all parameters of the model have.
    """

    def __init__(
        self, rows: Callable[[], int | None], tokens: Callable[[], int | None], tap: Tap, model_numbers: int
    ) -> None:
        super().__init__()
        self._rows, self._tokens, self._tap = rows, tokens, tap
        self._limit = max(SMALL_NUMBERS, int(SMALL_SHARE * model_numbers))
        self._around: list[str] = []  # paths of the modules that run now
        self.forget()

    def forget(self) -> None:
        """Forget the last forward."""
        self._derived: dict[int, DerivedTensor] = {}
        self._doubts: list[tuple[str, Tensor]] = []
        self._refused: UnsupportedModelError | None = None
        self._depth = self._trusted = 0
        self.may_mix: str | None = None
        """The first function that may bring rows together, and where, or None."""

    def hooks(self, model: nn.Module, layers: list[TrainableLayer]) -> Iterator[RemovableHandle]:
        """Watch every module around these layers, and trust experts that hold none of them."""
        modules = around(model, layers)
        for path, module in modules.items():
            yield from while_running(module, partial(self._enter, path), self._leave)
        for module in model.modules() if layers else ():
            if keeps_tokens_apart(module) and not (is_experts(module) and module in modules.values()):
                yield from while_running(module, partial(self._trust, 1), partial(self._trust, -1))

    def _enter(self, path: str) -> None:
        self._around.append(path)
        if len(self._around) == 1:
            self.__enter__()

    def _leave(self) -> None:
        if self._around:
            self._around.pop()
            if not self._around:
                self.__exit__(None, None, None)

    def _trust(self, more: int) -> None:
        """A module that is known to keep rows apart begins (1) or ends (-1)."""
        self._trusted = max(0, self._trusted + more)

    def stop(self) -> None:
        """Leave what a KeyboardInterrupt has not left."""
        while self._around:
            self._leave()

    @contextmanager
    def of(self, layers: list[TrainableLayer]) -> Iterator[None]:
        """See what is done with the parameters of these layers."""
        for layer in layers:
            for name in layer.parameters:
                in_place = layer.module._parameters[name]
                assert in_place is not None
                source = ParameterInPlace(layer, name, in_place)
                self._derived[id(in_place)] = DerivedTensor(in_place, (source,), False, in_place._version)
        self._depth += 1
        try:
            yield
        except RuntimeError:
            if self._refused is not None:
                raise self._refused from None
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._derived = {}

    def refuse_doubtful(self) -> None:
        """Refuse the model if an operation did not give for one row alone what it gave for it in the batch."""
        if self._refused is not None:  # and the model caught it
            raise self._refused
        doubts, self._doubts = self._doubts, []
        if doubts and bool(torch.stack([wrong.cpu() for _, wrong in doubts]).any()):
            what = next(what for what, wrong in doubts if bool(wrong))
            raise UnsupportedModelError(
                f"{what} gives a row of the batch something else than that row alone: rows mix, or it is random."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        derived, given = self._derived, list(flat([*args, *kwargs.values()]))
        activations = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
        if not any(id(value) in derived for value in given):
            result = func(*args, **kwargs)
            self._note_mixing(func, args, kwargs, activations, result)
            return result
        activations = [activation for activation in activations if id(activation) not in derived]
        try:
            result = self._with_parameters(func, types, args, kwargs)
            self._note_mixing(func, args, kwargs, activations, result)
            return result
        except UnsupportedModelError as error:  # a TypeError, which Python takes for "try the operands the other way"
            self._refused = error
            raise RuntimeError("refused by the score tape") from error

    def _with_parameters(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that has a parameter, or what was made of one, among its arguments."""
        all_derived, apart = self._derived, out_of_place(func)
        if apart is not None and args[0].requires_grad and id(args[0]) not in all_derived:
            return args[0].copy_(self.__torch_function__(apart, types, (args[0].clone(), *args[1:]), kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        derived = {place: all_derived[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in all_derived}
        for weight in derived.values():
            if weight.tensor._version != weight.version:  # through a view, which may have brought in other parameters
                raise UnsupportedModelError(
                    f"{weight.sources[0].path}: what was made of it was changed in place through a view."
                )
        operation, output, alone = self._in_rows(func, leaves, spec, derived)
        if operation is None:
            return self._follow(func, args, kwargs, derived)
        try:
            return self._meet(operation, output, alone, args, kwargs)
        finally:
            operation.let_go()

    def _note_mixing(self, func: Any, args: Any, kwargs: Any, activations: list[Tensor], result: Any) -> None:
        """Note the first function that may bring rows together."""
        batched = [activation for activation in activations if activation.ndim > 2]
        rows = self._rows() or (batched[0].shape[0] if batched else 1)
        if self._trusted or self.may_mix is not None or not activations or rows == 1:
            return
        if not keeps_rows(func, args, kwargs, args[0] if result is None else result, activations, rows):
            where = self._around[-1] if self._around else "a module without a rule"
            self.may_mix = f"{name_of(func)} in {where}"

    def _leads(self, activation: Tensor, rows: int) -> bool:
        """Whether the leading axis is the batch's rows, or these and their tokens, or these and heads before tokens."""
        tokens, shape = self._tokens(), activation.shape
        if not activation.ndim or not shape[0] or shape[0] == rows or rows == 1:
            return bool(activation.ndim and shape[0])
        heads = activation.ndim > 2 and shape[1] == tokens and shape[0] % rows == 0
        return tokens is not None and (heads or shape[0] % (rows * tokens) == 0)

    def _in_rows(
        self, func: Any, leaves: list[Any], spec: TreeSpec, derived: dict[int, DerivedTensor]
    ) -> tuple[Operation | None, Any, Tensor | None]:
        """The operation, its output and that of the last row alone, if it takes activations."""
        # Activations are what autograd follows, or what leads with rows.
        weight = _first(derived)
        others = [p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and p not in derived]
        rows = self._rows()
        if rows is None:
            rows = next((leaves[p].shape[0] for p in others if leaves[p].ndim > 1), 1)
        followed = [p for p in others if leaves[p].requires_grad]
        # The ids or angles of all rows, (T,), may be as many as rows.
        in_rows = [p for p in others if self._leads(leaves[p], rows) and (p in followed or leaves[p].ndim > 1)]
        odd = [p for p in followed if p not in in_rows]
        if odd:
            raise UnsupportedModelError(
                f"{weight.path}: it meets an activation of shape {tuple(leaves[odd[0]].shape)} in {name_of(func)}, "
                f"which does not lead with all of the batch's {rows} rows; there is no rule for {weight.kind}."
            )
        if not in_rows or (not followed and not is_pure(func)):
            return None, None, None
        output: Any = None
        for chosen in (in_rows, followed) if followed else (in_rows,):
            constants = [p for p in others if p not in chosen]
            operation = Operation(func, leaves, spec, derived, chosen, rows, autocast(leaves[chosen[0]]), constants)
            if output is None:
                before = random_state(leaves[chosen[0]])
                output = operation.call({place: made.tensor.detach() for place, made in derived.items()})
                if not torch.equal(before, random_state(leaves[chosen[0]])):
                    raise UnsupportedModelError(
                        f"{weight.path}: {name_of(func)} is random (dropout?), and cannot be made again by rows."
                    )
            alone = operation.last_row() if rows > 1 else None
            if rows == 1 or chosen == followed or _fits(alone, output, rows):
                if rows > 1 and followed and chosen != followed and isinstance(output, Tensor):
                    self._refuse_ambiguous(operation, followed, output)
                return operation, output, alone
        return None, None, None

    def _refuse_ambiguous(self, operation: Operation, followed: list[int], output: Tensor) -> None:
        """Refuse constants with as many entries as rows, such as a table of T = S positions, that may be no rows."""
        constants = [*operation.constants, *(p for p in operation.in_rows if p not in followed)]
        if _fits(replace(operation, in_rows=followed, constants=constants).last_row(), output, operation.rows):
            raise UnsupportedModelError(
                f"{_first(operation.derived).path}: {name_of(operation.function)} takes a constant with as many "
                f"entries as the batch's {operation.rows} rows, which may be rows or not; try another number of rows."
            )

    def _follow(self, func: Any, args: Any, kwargs: Any, derived: dict[int, DerivedTensor]) -> Any:
        """Run a function of derived tensors and constants alone, and remember what it gives."""
        result = func(*args, **kwargs)
        sources = tuple({source.path: source for weight in derived.values() for source in weight.sources}.values())
        written = [args[0]] if result is None and args else []
        for value in flat([result, *written]):
            if isinstance(value, Tensor) and value.requires_grad:
                transposed = alias(func, value, list(derived.values()))
                self._derived[id(value)] = DerivedTensor(value, sources, transposed, value._version)
        return result

    def _meet(self, operation: Operation, output: Any, alone: Tensor | None, args: Any, kwargs: Any) -> Any:
        """Run a function of derived tensors and activations, its output tapped."""
        func, weight = operation.function, _first(operation.derived)
        if not any(isinstance(value, Tensor) for value in flat([output])) and output is not None:
            return output  # a shape, a type
        single = isinstance(output, Tensor) and is_pure(func)
        if single and not output.is_floating_point() and not output.is_complex():
            return output  # a comparison
        if not single or not output.is_floating_point() or not output.ndim or output.shape[0] % operation.rows:
            raise UnsupportedModelError(
                f"{weight.path}: it is used in {name_of(func)}, which writes into a tensor, or gives several, or none "
                f"with the batch's leading axis; there is no rule for {weight.kind}."
            )
        factored = factors_of(operation, args, kwargs, self._tokens() or 0)
        if factored is not None:
            gradients, sources, input = factored
            return self._tap(gradients, sources, output, [input], None)
        if operation.rows > 1:
            self._doubt(f"{weight.path}: {name_of(func)}", operation.rows, output, alone)
        operation.refuse_large(self._limit)
        saved = [operation.leaves[place] for place in (*operation.in_rows, *operation.constants)]
        return self._tap(product, operation.sources, output, saved, operation)

    def _doubt(self, what: str, rows: int, output: Tensor, alone: Tensor | None) -> None:
        """Note whether the last row alone gives something else; looked at in `refuse_doubtful`: a GPU need not wait."""
        batch = output.detach()[-(output.shape[0] // rows) :]
        if alone is None or alone.shape != batch.shape:
            raise UnsupportedModelError(f"{what} cannot be taken for one row alone; do rows mix?")
        scale = batch.nan_to_num(posinf=0.0, neginf=0.0).abs().amax() * torch.finfo(batch.dtype).eps ** 0.5
        same = (alone == batch) | ((alone - batch).abs() <= scale) | (alone.isnan() & batch.isnan())
        self._doubts.append((what, ~same.all()))


def _fits(alone: Tensor | None, output: Any, rows: int) -> bool:
    """Whether the last row alone has the shape of the last row of the output; other outputs than tensors have none."""
    if not isinstance(output, Tensor):
        return True
    if alone is None or not output.ndim or output.shape[0] % rows:
        return False
    return alone.shape == output[-(output.shape[0] // rows) :].shape


def _first(derived: dict[int, DerivedTensor]) -> ParameterInPlace:
    return next(iter(derived.values())).sources[0]
