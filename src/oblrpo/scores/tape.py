"""The score tape: exact squared score norms and the weighted gradient from one forward and one backward.

The backward is for activations only. It leaves, for every call of a layer, the inputs A_s and the output gradients B_s
of each sequence; the layer's share of the score is B_s' A_s, whose norm needs no such product (`contributions`), and
sum_s a_s B_s' A_s, for coefficients a_s that may depend on those norms, is the parameter gradient (book-keeping,
Bu et al. 2022, arXiv 2210.00038). So the coefficients are chosen *after* the backward, and no second one is needed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oblrpo.scores import contributions
from oblrpo.scores.contributions import Contribution
from oblrpo.scores.rules import Call, UnsupportedModelError, rule_for


class ScoreTape:
    """Squared score norms w_s = || grad_theta log pi(o_s|q_s) ||^2 and sum_s a_s grad_theta log pi(o_s|q_s).

    Use::

        with ScoreTape(model) as tape:
            logps_S = ...                    # (S,), differentiable; entry s depends on batch row s only
            tape.record(logps_S)             # one backward for activations; no .grad changes
        norm2_S = tape.norm2()
        group_norm2_P = tape.accumulate(coef_S, group_size=G)

    The norms cover exactly the parameters with `requires_grad`. Leaving the `with` restores the model; a tape may be
    entered again. Activations and their gradients are held until the tape is entered again or dropped.

    Limits: dropout and other randomness between rows must be off; batch rows must not mix (no BatchNorm); the first
    axis of what every module with trainable parameters sees must be the batch row. A first axis of another size is
    refused; one of another meaning that happens to have the size S cannot be told.

    Activations and gradients of shorter types than float32 are widened to it, so that sums are not rounded.

    Raises:
        UnsupportedModelError: a trainable parameter belongs to a layer type without a rule (the module is named); a
            parameter was used other than by calling its module; an activation was changed in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._owners = _owners_of_trainable_parameters(model)
        self._handles: list[RemovableHandle] = []
        self._calls: list[_RecordedCall] = []
        self._parts: dict[nn.Parameter, list[Contribution]] = {}
        self._sequences = 0

    def __enter__(self) -> ScoreTape:
        if self._handles:
            raise RuntimeError("this tape is already recording; use one `with` at a time.")
        self._owners = _owners_of_trainable_parameters(self.model)
        self._calls, self._parts, self._sequences = [], {}, 0
        for owner in self._owners.values():
            module = owner.module
            self._handles += [
                module.register_forward_pre_hook(owner.hide_parameters, prepend=True),
                module.register_forward_hook(self._after_forward, prepend=True, with_kwargs=True, always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._calls = []
        for owner in self._owners.values():  # a KeyboardInterrupt inside a forward skips its hook
            owner.show_parameters()

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        owner = self._owners[module]
        owner.show_parameters()
        # Recomputation under activation checkpointing runs inside a backward; the first forward was recorded.
        if output is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        first = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(first, Tensor) or not isinstance(output, Tensor):
            raise UnsupportedModelError(f"{owner.name}: its rule needs one tensor in and one tensor out.")
        if not output.requires_grad:
            output.requires_grad_()  # the first trainable layer: nothing below it needs a gradient
        self._calls.append(_RecordedCall(owner, first, output, first._version, output._version))

    def record(self, logps_S: Tensor) -> None:
        """Run the backward for activations of sum_s logps_S[s]; no parameter's `.grad` changes.

        Args:
            logps_S: (S,) log-probabilities whose entry s depends on batch row s of the model's input only.

        Raises:
            UnsupportedModelError: see the class.
            ValueError: logps_S is not a differentiable vector, or nothing was run inside the `with`.
        """
        if logps_S.ndim != 1 or not logps_S.requires_grad:
            raise ValueError(f"record needs differentiable log-probabilities of shape (S,), got {logps_S.shape}.")
        if self._sequences:
            raise ValueError("record once in each `with`; enter the tape again for the next micro-batch.")
        if not self._calls:
            raise ValueError("nothing to record: run the model inside the `with` block, with gradients enabled.")
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        outputs = [call.output for call in self._calls]
        # The parameters are inputs too: inside their modules they are hidden from autograd, so a gradient means they
        # were used elsewhere (a fused loss on lm_head.weight, say) and the tape would miss that share.
        grads = torch.autograd.grad(logps_S.sum(), [*outputs, *parameters.values()], allow_unused=True)
        for name, grad in zip(parameters, grads[len(outputs) :], strict=True):
            if grad is not None:
                raise UnsupportedModelError(
                    f"{name} is used other than by calling its module (a fused or functional layer?); "
                    "the score norms would miss that use. Use the module's own forward."
                )
        calls, self._calls, self._parts = self._calls, [], {}
        for call, grad in zip(calls, grads[: len(outputs)], strict=True):
            if grad is not None:
                call.check(logps_S.shape[0])
                self._add(call, grad)
        self._sequences = logps_S.shape[0]  # only now: a refused record leaves nothing to read

    def _add(self, call: _RecordedCall, grad: Tensor) -> None:
        owner = call.owner
        rule = rule_for(owner.module)
        assert rule is not None
        with torch.no_grad():
            parts = rule(Call(owner.module, call.input.detach(), call.output.detach()), grad)
        for name, parameter in owner.parameters.items():
            if name not in parts:
                raise UnsupportedModelError(
                    f"{owner.name}: its rule gives no gradient for {name} (a parametrised weight?)."
                )
            self._parts.setdefault(parameter, []).append(parts[name])

    @torch.no_grad()
    def norm2(self) -> Tensor:
        """Squared score norms || grad_theta logps_S[s] ||^2 over all trainable parameters, shape (S,)."""
        self._need_record()
        norms = [contributions.norm2(parts) for parts in self._parts.values()]
        dtype = max((norm2_S.dtype for norm2_S in norms), key=lambda each: torch.finfo(each).bits)
        return torch.stack([norm2_S.to(dtype) for norm2_S in norms]).sum(0)

    @torch.no_grad()
    def accumulate(self, coef_S: Tensor, group_size: int = 1) -> Tensor:
        """Add sum_s coef_S[s] grad_theta logps_S[s] to every trainable parameter's `.grad`.

        Args:
            coef_S: (S,) any coefficients, taken as constants.
            group_size: G; sequences [p G, (p + 1) G) are group p.

        Returns:
            (S / G,) squared norm of each group's own contribution, || sum_{s in p} coef_s grad logps_s ||^2.

        Raises:
            ValueError: coef_S is not of shape (S,), or S is no multiple of group_size.
        """
        self._need_record()
        S = self._sequences
        if coef_S.shape != (S,) or group_size < 1 or S % group_size:
            raise ValueError(f"coef_S {tuple(coef_S.shape)} and group_size {group_size} do not fit {S} sequences.")
        total_P = torch.zeros(S // group_size, device=coef_S.device, dtype=_wide(coef_S.dtype))
        for parameter, parts in self._parts.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            wide = grad if grad.dtype == _wide(grad.dtype) else torch.zeros_like(grad, dtype=torch.float32)
            coef = coef_S.detach().to(wide.dtype)
            total_P += contributions.accumulate(parts, coef, group_size, wide).to(total_P.dtype)
            if wide is not grad:  # add to a short type once, not once a group
                grad += wide
        return total_P

    def _need_record(self) -> None:
        if not self._sequences:
            raise ValueError("call record(logps_S) inside the `with` block first.")


class _Owner:
    """A module with trainable parameters of its own, and the switch that hides them from autograd in its forward."""

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters

    def hide_parameters(self, module: nn.Module, args: Any) -> None:
        for name, parameter in self.parameters.items():
            module._parameters[name] = parameter.detach()  # type: ignore[assignment]

    def show_parameters(self) -> None:
        self.module._parameters.update(self.parameters)


class _RecordedCall:
    """A call's activations and their versions, so that a change in place is noticed."""

    def __init__(self, owner: _Owner, input: Tensor, output: Tensor, *versions: int) -> None:
        self.owner, self.input, self.output, self.versions = owner, input, output, versions

    def check(self, sequences: int) -> None:
        if (self.input._version, self.output._version) != self.versions:
            raise UnsupportedModelError(f"{self.owner.name}: its input or output was changed in place after the call.")
        if self.output.shape[0] != sequences or self.input.shape[0] != sequences:
            raise UnsupportedModelError(
                f"{self.owner.name}: got {tuple(self.input.shape)} for {sequences} sequences; "
                "the first axis must be the batch row (packed rows and expert layers have no rule yet)."
            )


def _owners_of_trainable_parameters(model: nn.Module) -> dict[nn.Module, _Owner]:
    owners = {}
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        if rule_for(module) is None:
            raise UnsupportedModelError(
                f"no score-norm rule for {type(module).__name__} at {name or 'the model itself'} "
                f"(trainable: {', '.join(own)}); freeze it or add a rule with oblrpo.scores.register_rule."
            )
        owners[module] = _Owner(name, module, own)
    if not owners:
        raise UnsupportedModelError("the model has no trainable parameter.")
    return owners


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
