"""Watches a model's forward and hands every parameter's shares of the score to its store in the backward.

While a module with a rule runs, its parameters are hidden from autograd, and its output passes through a tap: an
identity whose backward sees the output gradient beside the input, which autograd saved for it. Saving through autograd
means that activation checkpointing and offloading hooks treat the inputs like everything else, and that changes in
place are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oblrpo.scores.contributions import Contribution, wide
from oblrpo.scores.inside import Forward, forward_for
from oblrpo.scores.layout import Layout, take
from oblrpo.scores.rules import Call, Gradients, UnsupportedModelError, gain_offset, linear, rms_norm, rule_for
from oblrpo.scores.stores import Store

ACTIVE: list[Recorder] = []
"""Recorders inside their `with`, innermost last."""


class Slot:
    """A trainable parameter, or one expert's slice of it, and what the forward has shown of its use."""

    def __init__(self, name: str, parameter: nn.Parameter, index: int | None) -> None:
        self.name, self.parameter, self.index = name, parameter, index
        self.calls = 0
        self.tokens = 0
        self.only_lookups = True

    @property
    def shape(self) -> torch.Size:
        """Shape of the gradient."""
        return self.parameter.shape if self.index is None else self.parameter.shape[1:]

    @contextmanager
    def wide_grad(self) -> Iterator[Tensor]:
        """The `.grad` to add to, in float32 or wider: a short type is rounded once, at the end."""
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        grad = parameter.grad if self.index is None else parameter.grad[self.index]
        added = grad if wide(grad[:0]).dtype == grad.dtype else torch.zeros_like(grad, dtype=torch.float32)
        yield added
        if added is not grad:
            grad += added


class Recorder:
    """The hooks on one model, and the taps of one forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._owners = owners_of_trainable_parameters(model)
        self._root = torch.zeros((), requires_grad=True)  # reached from every tap, so that each runs in the backward
        self._handles: list[RemovableHandle] = []
        self._delivered: list[Slot] = []
        self._slots: dict[tuple[int, int | None], Slot] = {}
        self.rows: int | None = None
        self.tokens: int | None = None

    @property
    def slots(self) -> list[Slot]:
        """What the present forward used."""
        return [slot for slot in self._slots.values() if slot.calls]

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._handles)

    def start(self) -> None:
        """Put the hooks in place, for a new forward.

        Raises:
            RuntimeError: they are in place already.
        """
        if self.active:
            raise RuntimeError("this tape is already recording; use one `with` at a time.")
        self._owners = owners_of_trainable_parameters(self.model)
        self.rows = self.tokens = None
        for slot in self._slots.values():
            slot.calls = slot.tokens = 0
        self._hook()

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for owner in self._owners.values():  # a KeyboardInterrupt inside a forward skips its hook
            owner.show_parameters()
            owner.restore_forward()
        if self in ACTIVE:
            ACTIVE.remove(self)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """The hooks once more, for a backward that may recompute parts of the forward."""
        if self.active:
            yield
            return
        self._hook()
        try:
            yield
        finally:
            self.stop()

    def _hook(self) -> None:
        for owner in self._owners.values():
            module = owner.module
            if owner.inside is not None:
                owner.replace_forward(partial(owner.inside, module, partial(self.tap, owner)))
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_forward_hook(self._after_forward, prepend=True, with_kwargs=True, always_call=True),
            ]
        ACTIVE.append(self)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._owners[module].hide_parameters()
        # Learned positions of shape (1, T) are meant for every row: their gradients must not be summed over rows.
        first = args[0] if args else None
        if isinstance(module, nn.Embedding) and isinstance(first, Tensor) and first.shape[0] == 1 and self.rows:
            return (first.expand(self.rows, *first.shape[1:]), *args[1:])
        return None

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        owner = self._owners[module]
        owner.show_parameters()
        if output is None or not torch.is_grad_enabled() or owner.inside is not None:
            return None
        first = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(first, Tensor) or not isinstance(output, Tensor):
            raise UnsupportedModelError(f"{owner.name}: its rule needs one tensor in and one tensor out.")
        rule = rule_for(module)
        assert rule is not None
        use = self._use(owner, rule.gradients, dict(owner.parameters), None, None, first, output)
        return _Tap.apply(output, self._root, use, first, *([output] if rule.needs_output else []))

    def tap(
        self,
        owner: Owner,
        name: str,
        input: Tensor,
        output: Tensor,
        slot: int | None = None,
        position_N: Tensor | None = None,
    ) -> Tensor:
        """`inside.Tap` for a module's own linear products."""
        if not torch.is_grad_enabled():
            return output
        names = {"weight": owner.parameters[name]}
        use = self._use(owner, linear, names, slot, position_N, input, output)
        tapped: Tensor = _Tap.apply(output, self._root, use, input)
        return tapped

    def _use(
        self,
        owner: Owner,
        gradients: Gradients,
        names: dict[str, nn.Parameter],
        index: int | None,
        position_N: Tensor | None,
        input: Tensor,
        output: Tensor,
    ) -> Use:
        slots = {}
        # Recomputation under activation checkpointing runs inside a backward; the first forward was counted.
        counting = torch._C._current_graph_task_id() == -1
        if counting and output.ndim >= 3 and self.tokens is None:
            self.rows, self.tokens = output.shape[0], output.shape[1]
        for name, parameter in names.items():
            slot = self._slots.setdefault((id(parameter), index), Slot(f"{owner.name}.{name}", parameter, index))
            slots[name] = slot
            if counting:
                slot.calls += 1
                slot.tokens += output.numel() // output.shape[-1]
                slot.only_lookups &= not input.is_floating_point()
        return Use(self, owner, gradients, slots, position_N)

    def backward(
        self,
        logps_S: Tensor,
        coef_S: Tensor | None,
        layout: Layout,
        stores: Mapping[Slot, Store],
        keep_graph: bool,
    ) -> list[Slot]:
        """Backward of sum_s coef_s logps_s for activations only; every slot's shares go to its store when complete.

        Returns:
            The slots that got shares: those whose output matters to logps_S.

        Raises:
            UnsupportedModelError: a parameter is used around its module, or checkpointing is reentrant.
            RuntimeError: autograd's own.
        """
        self._layout, self._stores, self._delivered = layout, stores, []
        self._pending: dict[Slot, list[Contribution]] = {}
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # The parameters are inputs too: inside their modules they are hidden from autograd, so a gradient means they
        # were used elsewhere (a fused loss on lm_head.weight, say) and the norms would miss that share.
        try:
            _, *grads = torch.autograd.grad(
                logps_S,
                [self._root, *parameters.values()],
                torch.ones_like(logps_S) if coef_S is None else coef_S,
                allow_unused=True,
                retain_graph=keep_graph,
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise UnsupportedModelError(
                    "reentrant activation checkpointing hides the layers from the tape; "
                    "use gradient_checkpointing_enable({'use_reentrant': False})."
                ) from None
            raise
        for name, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                raise UnsupportedModelError(
                    f"{name} is used other than by calling its module (a fused or functional layer?); the score norms "
                    "would miss that use. Use the module's own forward, or scores.chunked_logps for a large head."
                )
        for slot in list(self._pending):  # calls whose output does not matter brought nothing
            self._complete(slot)
        return self._delivered

    @torch.no_grad()
    def receive(self, use: Use, input: Tensor, output: Tensor | None, grad: Tensor) -> None:
        """What a tap saw in the backward.

        Raises:
            UnsupportedModelError: the activations' leading axes are not understood.
        """
        layout = self._layout
        try:
            if use.position_N is None:
                rows = layout.rows
            else:
                index_ST = layout.rows_at(use.position_N)
                rows = partial(take, index_ST=index_ST)
            call = Call(use.owner.module, rows(input), None if output is None else rows(output))
            grad = rows(grad)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{use.owner.name}: got {error}; activations must lead with batch rows, or with rows times tokens."
            ) from None
        self.deliver(use, use.gradients(call, grad))

    def deliver(self, use: Use, parts: Mapping[str, Contribution]) -> None:
        """Give shares to their slots, and complete slots to their stores.

        Raises:
            UnsupportedModelError: a share is missing.
        """
        for name, slot in use.slots.items():
            if name not in parts:
                raise UnsupportedModelError(
                    f"{use.owner.name}: its rule gives no gradient for {name} (a parametrised weight?)."
                )
            pending = self._pending.setdefault(slot, [])
            pending.append(parts[name])
            if len(pending) == slot.calls:
                self._complete(slot)

    def _complete(self, slot: Slot) -> None:
        self._stores[slot].take(self._pending.pop(slot))
        self._delivered.append(slot)


class Use:
    """One tapped call: whose, by which rule, of which parameters."""

    def __init__(
        self,
        recorder: Recorder,
        owner: Owner,
        gradients: Gradients,
        slots: dict[str, Slot],
        position_N: Tensor | None,
    ) -> None:
        self.recorder, self.owner, self.gradients = recorder, owner, gradients
        self.slots, self.position_N = slots, position_N


class _Tap(torch.autograd.Function):
    """Identity on `output`; its backward shows the call's input and output gradient to the recorder."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor, use: Use, *saved: Tensor) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        use: Use = ctx.use
        if grad is None:
            return None, None, None, *(None for _ in ctx.needs_input_grad[3:])
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" in str(error):
                raise UnsupportedModelError(
                    f"{use.owner.name}: its input or output was changed in place after the call."
                ) from None
            raise
        use.recorder.receive(use, saved[0], saved[1] if len(saved) > 1 else None, grad)
        return grad, None, None, *(None for _ in saved)


class Owner:
    """A module with trainable parameters of its own, and the switches of its forward."""

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.inside: Forward | None = None
        self._forward: Any = None

    def hide_parameters(self) -> None:
        """Take the parameters away from autograd."""
        for name, parameter in self.parameters.items():
            self.module._parameters[name] = parameter.detach()  # type: ignore[assignment]

    def show_parameters(self) -> None:
        """Put the parameters back."""
        self.module._parameters.update(self.parameters)

    def replace_forward(self, forward: Forward) -> None:
        """Let the module compute with this forward."""
        self._forward = self.module.__dict__.get("forward")
        self.module.forward = forward

    def restore_forward(self) -> None:
        """Give the module its own forward back."""
        if self.inside is None:
            return
        self.module.__dict__.pop("forward", None)
        if self._forward is not None:
            self.module.forward = self._forward


def owners_of_trainable_parameters(model: nn.Module) -> dict[nn.Module, Owner]:
    """Every module with trainable parameters of its own.

    Raises:
        UnsupportedModelError: there is none, or one has no rule.
    """
    owners = {}
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        owner = owners[module] = Owner(name or "the model itself", module, own)
        owner.inside = forward_for(module)
        if owner.inside is None:
            _check_rule(owner)
    if not owners:
        raise UnsupportedModelError("the model has no trainable parameter.")
    return owners


def _check_rule(owner: Owner) -> None:
    rule, kind = rule_for(owner.module), type(owner.module).__name__
    if rule is None:
        why = (
            "DoRA's weights are not a sum of layers; use LoRA"
            if "Dora" in kind
            else "freeze it or add a rule with oblrpo.scores.register_rule"
        )
        raise UnsupportedModelError(
            f"no score-norm rule for {kind} at {owner.name} (trainable: {', '.join(owner.parameters)}); {why}."
        )
    if rule.gradients is rms_norm:
        try:
            gain_offset(owner.module)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{owner.name}: {error}") from None
