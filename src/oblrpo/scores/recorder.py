"""Watches a model's forward and hands every parameter's shares of the score to its store in the backward.

While a module with a rule runs, its parameters are hidden from autograd, and its output passes through a tap: an
identity whose backward sees the output gradient beside the input, which autograd saved for it. Saving through autograd
means that activation checkpointing and offloading hooks treat the inputs like everything else, and that changes in
place are noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oblrpo.scores import rules
from oblrpo.scores.experts import Dispatch
from oblrpo.scores.layout import Layout
from oblrpo.scores.operations import Operation, ParameterInPlace
from oblrpo.scores.rules import Gradients, UnsupportedModelError, product, rule_for, wrapped_by_fsdp
from oblrpo.scores.tapped_calls import OutputTap, ShareCollector, Take, TappedCall
from oblrpo.scores.tapped_operations import OperationTapper
from oblrpo.scores.trainable_layers import (
    ParameterPiece,
    Place,
    TrainableLayer,
    look_up_per_row,
    replace_forward,
    scopes,
    trainable_layers,
    while_running,
)

REENTRANT = "reentrant activation checkpointing hides the layers from the tape; checkpoint with use_reentrant=False."


def nodes(output: Tensor, into_layers: bool) -> Iterator[Any]:
    """The nodes of the graph that made the output, the nearest first; down to the recorded layers, or into them."""
    waiting, seen = deque([output.grad_fn]), set[Any]()
    while waiting:
        node: Any = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        function = getattr(node, "_forward_cls", None)
        if into_layers or function is None or is_foreign(function):
            waiting.extend(following for following, _ in node.next_functions)


def is_foreign(function: type) -> bool:
    """Whether an autograd function written in Python is none of the score tape's."""
    return not function.__module__.startswith("oblrpo.scores.")


def foreign_functions(output: Tensor) -> Iterator[type]:
    """Autograd functions written in Python that the output was computed by, but for those of the score tape."""
    functions = (getattr(node, "_forward_cls", None) for node in nodes(output, into_layers=True))
    return (function for function in functions if function is not None and is_foreign(function))


def foreign_hooks() -> bool:
    """Whether what autograd saves now passes through hooks (offloading, say) other than those of torch itself."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")


def why_nothing_was_recorded(logps_S: Tensor, ran_without_gradients: bool) -> str:
    """What hid every layer of the model from the tape, as far as the graph shows."""
    functions = list(foreign_functions(logps_S))
    if any(function.__name__ == "CheckpointFunction" for function in functions):
        return REENTRANT
    if functions:
        names = ", ".join(sorted({function.__name__ for function in functions}))
        return f"the layers run inside an autograd function ({names}), which hides them from the tape."
    if ran_without_gradients:
        return (
            "the layers ran without gradients: under torch.no_grad(), or inside reentrant activation checkpointing "
            "(checkpoint with use_reentrant=False)."
        )
    return (
        "run the model inside the `with` block, with gradients enabled; it must be the model that the tape was given, "
        "and not its compiled twin (torch.compile)."
    )


ACTIVE: list[ForwardRecorder] = []
"""The recorders that are inside their `with`, innermost last."""


class ForwardRecorder:
    """The hooks on one model, and the taps of one forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Reached from every tap, so that each runs in the backward.
        self.root = torch.zeros((), requires_grad=True, device="cpu")
        self.collector = ShareCollector()
        self._undo = ExitStack()
        numbers = sum(p.numel() for p in model.parameters())
        self.operations = OperationTapper(lambda: self.batch_rows, lambda: self.tokens, self._tap_operation, numbers)
        self._begin()

    def _begin(self) -> None:
        self.layers = trainable_layers(self.model)
        self.pieces: dict[tuple[int, int | None], ParameterPiece] = {}
        ruled = [(layer.module, rule_for(layer.module)) for layer in self.layers.values() if not layer.by_operations]
        self._divisible = rules.divisible(norm for norm, rule in ruled if rule and rule.gradients is rules.rms_norm)
        self._gathered: dict[int, tuple[str, nn.Parameter]] = {}
        self.ran_without_gradients = self.foreign_hooks = False
        self.batch_rows: int | None = None
        self.tokens: int | None = None
        self.given: tuple[str, ...] = ()  # names of the arguments of the model's call
        self.operations.forget()

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return self in ACTIVE

    def start(self) -> None:
        """Put the hooks in place, for a new forward; if they are there already, that is a RuntimeError."""
        if self.active:
            raise RuntimeError("this tape is already recording; use one `with` at a time.")
        self._begin()
        try:
            self._hook()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Take the hooks away."""
        self._undo.close()

    def _hook(self) -> None:
        undo = self._undo.callback
        for restore in look_up_per_row(self.model):
            undo(restore)
        general = [layer for layer in self.layers.values() if layer.by_operations]
        for handle in self._hooks(general):
            undo(handle.remove)
        for module, (path, layers) in scopes(self.model, general).items():
            parts = [self.layers[part] for part in module.children() if part in self.layers]
            near = [part for part in parts if part.inside is None and part not in layers]  # it may use their weights
            undo(replace_forward(path, module, partial(self._forward_seen, module, layers + near)))
        for layer in self.layers.values():
            undo(layer.show_parameters)  # a KeyboardInterrupt inside a forward skips its hook
            if layer.inside is not None and layer.user is None and layer not in general:
                forward = partial(layer.inside, layer.module, partial(self._tap_product, layer))
                undo(replace_forward(layer.name, layer.module, forward))
        undo(self.operations.stop)
        ACTIVE.append(self)
        undo(partial(ACTIVE.remove, self))

    def _hooks(self, general: list[TrainableLayer]) -> Iterator[RemovableHandle]:
        for name, module in self.model.named_modules():
            if wrapped_by_fsdp(module):
                yield module.register_forward_pre_hook(partial(self._gather, name))
        yield from self.operations.hooks(self.model, general)
        for layer in self.layers.values():
            if layer.by_operations:
                continue
            if layer.user is not None:
                yield from while_running(layer.user, layer.hide_parameters, layer.show_parameters)
                continue
            # FSDP gathers a module's parameters in a hook of its own, which must come first.
            first = not wrapped_by_fsdp(layer.module)
            yield layer.module.register_forward_pre_hook(self._before_forward, prepend=first)
            yield layer.module.register_forward_hook(
                self._after_forward, prepend=True, with_kwargs=True, always_call=True
            )
        yield self.model.register_forward_pre_hook(self._before_model, prepend=True, with_kwargs=True)

    def _gather(self, prefix: str, module: nn.Module, args: Any) -> None:
        """Note the parameters that FSDP has gathered: a use of those around their modules must not go unnoticed."""
        for name, parameter in module.named_parameters(prefix=prefix):
            if parameter.requires_grad:
                self._gathered[id(parameter)] = (name, parameter)

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]  # a mask may have other leading axes
        shapes = [x.shape for x in (*first, *args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim >= 2]
        if shapes and torch.is_grad_enabled() and self.tokens is None:
            self.batch_rows, self.tokens = shapes[0][:2]
            self.given = tuple(sorted(name for name, value in kwargs.items() if value is not None))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        layer = self.layers[module]
        layer.hide_parameters()
        # Learned positions of shape (1, T) or (T,) are meant for every row: their gradient would be summed over rows.
        first, rows = args[0] if args else None, self.batch_rows
        if rows and isinstance(module, nn.Embedding) and isinstance(first, Tensor) and torch.is_grad_enabled():
            if first.ndim == 1:
                raise UnsupportedModelError(f"{layer.name}: ids of shape (T,) for all rows; give it ids of every row.")
            if first.shape[0] == 1:
                return (first.expand(rows, *first.shape[1:]), *args[1:])
        return None

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer = self.layers[module]
        layer.show_parameters()
        self.ran_without_gradients |= not torch.is_grad_enabled()
        if output is None or not torch.is_grad_enabled() or layer.inside is not None:
            return None
        first = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(first, Tensor) or not isinstance(output, Tensor):
            raise UnsupportedModelError(f"{layer.name}: its rule needs one tensor in and one tensor out.")
        rule = rule_for(module)
        assert rule is not None
        call = self.tapped_call(layer, rule.gradients, dict(layer.parameters), output.shape)
        keeps_output = rule.needs_output and (self._divisible or rule.gradients is not rules.rms_norm)
        return OutputTap.apply(output, self.root, call, first, *([output] if keeps_output else []))

    def _forward_seen(self, module: nn.Module, layers: list[TrainableLayer], *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, in which the operations on these parameters are seen."""
        self.ran_without_gradients |= not torch.is_grad_enabled()
        with self.operations.of(layers):
            return type(module).forward(module, *args, **kwargs)

    def _tap_operation(
        self,
        gradients: Gradients,
        sources: dict[str, ParameterInPlace],
        output: Tensor,
        saved: list[Tensor],
        operation: Operation | None,
    ) -> Tensor:
        layer = next(iter(sources.values())).layer
        names = {key: source.layer.parameters[source.name] for key, source in sources.items()}
        call = self.tapped_call(layer, gradients, names, output.shape, operation=operation)
        tapped: Tensor = OutputTap.apply(output, self.root, call, *saved)
        return tapped

    def _tap_product(
        self, layer: TrainableLayer, roles: dict[str, str], input: Tensor, output: Tensor, dispatch: Dispatch
    ) -> Tensor:
        """Record a linear product inside a module, as `experts.ProductTap` says."""
        if not torch.is_grad_enabled():
            return output
        calls, shape = [], output.shape
        names = {role: layer.parameters[name] for role, name in roles.items() if name in layer.parameters}
        if names:
            calls.append(self.tapped_call(layer, product, names, shape, dispatch))
        for role, name in roles.items():
            for adapter in layer.adapters.get(name, ()):
                if adapter.active():
                    rule, places = adapter.rule(dispatch.index, role), adapter.places(dispatch.index)
                    calls.append(self.tapped_call(layer, rule, adapter.trainable, shape, dispatch, places=places))
        for call in calls:
            output = OutputTap.apply(output, self.root, call, input)
        return output

    def tapped_call(
        self,
        layer: TrainableLayer,
        gradients: Gradients,
        names: dict[str, nn.Parameter],
        output_shape: tuple[int, ...],
        dispatch: Dispatch | None = None,
        operation: Operation | None = None,
        places: Mapping[str, Place] = MappingProxyType({}),
    ) -> TappedCall:
        """Note a call of a layer, for its tap."""
        pieces, index = {}, None if dispatch is None else dispatch.index
        # Recomputation under activation checkpointing runs inside a backward; the first forward was counted.
        counting = torch._C._current_graph_task_id() == -1
        if counting and len(output_shape) >= 3 and self.tokens is None:
            self.batch_rows, self.tokens = output_shape[:2]
        for name, parameter in names.items():
            piece = ParameterPiece(parameter, index, places.get(name, index))
            pieces[name] = self.pieces.setdefault((id(parameter), index), piece)
            pieces[name].calls += counting
        self.foreign_hooks |= foreign_hooks()
        return TappedCall(self.collector, layer, gradients, pieces, dispatch, operation, recomputed=not counting)

    def backward(self, logps_S: Tensor, layout: Layout, take: Take) -> None:
        """Run the backward of sum_s logps_s for activations, and give every piece's shares on when they are complete.

        Raises:
            UnsupportedModelError: a parameter was used elsewhere, or a part of the model is hidden from the tape.
            RuntimeError: whatever else autograd refuses.
        """
        self.operations.refuse_doubtful()
        # The parameters are inputs too: inside their modules they are hidden from autograd, so a gradient means they
        # were used elsewhere (a fused loss on lm_head.weight, say) and the norms would miss that share.
        named = {id(p): (name, p) for name, p in self.model.named_parameters() if p.requires_grad} | self._gathered
        inputs = [self.root, *(parameter for _, parameter in named.values())]
        autocast = torch.autocast(logps_S.device.type, enabled=False)  # ours are products of the types they are given
        with self.collector.collecting(layout, take), autocast:
            try:
                _, *grads = torch.autograd.grad(logps_S, inputs, torch.ones_like(logps_S), allow_unused=True)
            except RuntimeError as error:
                if "use_reentrant" in str(error):
                    raise UnsupportedModelError(REENTRANT) from None
                raise
            for (name, _), grad in zip(named.values(), grads, strict=True):
                if grad is not None:
                    raise UnsupportedModelError(
                        f"{name} is used other than by calling its module (a fused or functional layer?); the score "
                        "norms would miss that use. Use the module's own forward, or scores.chunked_logps for a large "
                        "head."
                    )
            self.collector.complete()
