"""The modules that own the trainable parameters, and the switches of their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oblrpo.scores.contributions import Contribution, Outer, matmul
from oblrpo.scores.experts import Forward, forward_for, is_experts
from oblrpo.scores.rules import (
    Gradients,
    LayerCall,
    UnsupportedModelError,
    gain_offset,
    product,
    rms_norm,
    rule_for,
    wrapped_by_fsdp,
)

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Of weights to which PEFT adds the product as it is."""


Place: TypeAlias = int | tuple[slice, slice]
"""Where an expert's matrix is in a parameter that holds those of all experts."""


@dataclass(frozen=True)
class Adapter:
    """One adapter of a module's parameter, with the matrices A and B: LoRA on experts, by PEFT's `ParamWrapper`.

    While the wrapper runs, the weight of every expert e is W_e + c P_e Q_e. Nobody calls P and Q: PEFT adds their
    product to the weights. The recorded forward of the experts (`experts`) tells each expert's inputs and output
    gradients, that is G_e = sum_t l_t r_t', the gradient of its weight. Then that of P_e is c sum_t l_t (Q_e r_t)', and
    that of Q_e is c sum_t (P_e' l_t) r_t': factors of the adapter's rank, and G_e is never multiplied out.
    """

    path: str
    """Of the wrapper."""
    wrapper: Any
    name: str
    base: nn.Module
    """The module whose parameter is adapted."""
    parameter_name: str
    of_experts: bool
    """Whether the parameter is a matrix for each expert."""
    A: nn.Linear
    """Of weight (experts r, in), the experts one after the other."""
    B: nn.Linear
    """Of weight (out, r experts), the experts in turn."""
    trainable: dict[str, nn.Parameter]
    """The weights of A and B that are trained; in place they are hidden while the wrapper runs."""

    def refuse_odd(self) -> None:
        """Refuse an adapter of experts that the rule does not know."""
        weight, kind = self.wrapper.get_param(), type(self.base).__name__
        if not is_experts(self.base):
            raise UnsupportedModelError(
                f"{self.path}: LoRA on the bare parameter {self.parameter_name} of {kind}, whose forward is not known; "
                "leave it out of target_parameters."
            )
        if weight.requires_grad:
            raise UnsupportedModelError(
                f"{self.path}: {self.parameter_name} of {kind} is trained itself beside LoRA on it; freeze it."
            )
        if weight.dtype not in TYPES:
            raise UnsupportedModelError(
                f"{self.path}: LoRA on {self.parameter_name}, of type {weight.dtype}, which PEFT rounds and clamps."
            )

    def active(self) -> bool:
        """Whether the adapter is added now; one that is merged into the weight is refused."""
        if self.wrapper.disable_adapters or self.name not in self.wrapper.active_adapters:
            return False
        if self.wrapper.merged:
            raise UnsupportedModelError(
                f"{self.path}: its adapter is merged into {self.parameter_name}, so that A and B get no gradient; "
                "unmerge it (unmerge_adapter)."
            )
        return True

    def places(self, expert: int) -> dict[str, Place]:
        """Where the expert's parts of A and B are."""
        count = self.wrapper.num_experts
        r = self.A.weight.shape[0] // count
        return {"A": (slice(expert * r, (expert + 1) * r), slice(None)), "B": (slice(None), slice(expert, None, count))}

    def rule(self, expert: int, role: str) -> Gradients:
        """The gradients of the expert's parts from a product with its weight, or ("transposed") with its transpose."""
        places, scale = self.places(expert), float(self.wrapper.scaling[self.name])
        A, B = self.A.weight.detach()[places["A"]], self.B.weight.detach()[places["B"]]
        weights_are_rows = self.wrapper._did_swap_in_out_features  # (experts, out, in)

        def gradients(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
            weight = product(call, grad)[role]
            assert isinstance(weight, Outer)
            left, right = weight.left, weight.right
            if not weights_are_rows:  # the weight's transpose has the product B A
                left, right = right, left
            r, outputs = len(A), len(B)
            return {
                "A": Outer(scale * matmul(left, B), right, rows=r),
                "B": Outer(left, scale * matmul(right, A.mT), rows=outputs),
            }

        return gradients


def adapters(model: nn.Module) -> Iterator[Adapter]:
    """The adapters of bare parameters that have something to train."""
    for path, module in model.named_modules():
        wrapper: Any = module
        if type(module).__name__ == "ParamWrapper" and hasattr(module, "parameter_name"):
            for name in wrapper.lora_A:
                both = {"A": wrapper.lora_A[name], "B": wrapper.lora_B[name]}
                trainable = {key: linear.weight for key, linear in both.items() if linear.weight.requires_grad}
                if trainable:
                    target = wrapper.get_base_layer(), str(wrapper.parameter_name), wrapper._param_ndim == 3
                    yield Adapter(path, wrapper, name, *target, **both, trainable=trainable)


class ParameterPiece:
    """A trainable parameter, or one expert's slice of it, and what the forward has shown of its use."""

    def __init__(self, parameter: nn.Parameter, index: int | None, place: Place | None) -> None:
        self.parameter, self.index, self._place = parameter, index, place
        self.calls = 0

    def add(self, total: Tensor) -> None:
        """Add a sum in float32 or wider to the `.grad`, which is rounded once; where there is none, it becomes it."""
        parameter = self.parameter
        if parameter.grad is None:
            if self._place is None:
                parameter.grad = total.view(parameter.shape).to(parameter.dtype)
                return
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        part = parameter.grad if self._place is None else parameter.grad[self._place]
        part += total.view(part.shape)


class TrainableLayer:
    """A module with trainable parameters of its own, and the switches of its forward."""

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.inside: Forward | None = None
        self.by_operations = False  # no rule: see `operations`
        self.adapters: dict[str, list[Adapter]] = {}  # of its parameters, by name: see `Adapter`
        self.user: nn.Module | None = None  # uses the parameters without a call: see `Adapter`
        self._hidden: dict[str, nn.Parameter | None] = {}

    def hide_parameters(self) -> None:
        """Take the parameters away from autograd: those that are in place now, under FSDP the gathered ones."""
        for name in self.parameters.keys() - self._hidden.keys():
            parameter = self._hidden[name] = self.module._parameters[name]
            assert parameter is not None
            self.module._parameters[name] = parameter.detach()  # type: ignore[assignment]

    def show_parameters(self) -> None:
        """Put the parameters back."""
        self.module._parameters.update(self._hidden)
        self._hidden = {}


def replace_forward(name: str, module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Let the module compute with this forward, unless somebody else has replaced it; return what undoes it."""
    if "forward" in module.__dict__:
        raise UnsupportedModelError(f"{name}: its forward was replaced; what it computes now is not known.")
    module.forward = forward
    return partial(delattr, module, "forward")


def look_up_per_row(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Let PEFT models inside that train a prompt, and repeat it for every row, give it once; return what undoes it.

    Of prompt tuning and p-tuning the tape then has the prompt's ids looked up for each row.
    """
    for module in model.modules():
        encoders: Any = module._modules.get("prompt_encoder") or {}
        prompts = [coder for coder in encoders.values() if type(coder).__name__ in {"PromptEmbedding", "PromptEncoder"}]
        if any(prompt.embedding.weight.requires_grad for prompt in prompts):
            own: Any = module.get_prompt

            def get_prompt(batch_size: int, own: Any = own, **further: Any) -> Any:
                return own(1 if torch.is_grad_enabled() else batch_size, **further)

            module.get_prompt = get_prompt  # type: ignore[assignment]
            yield partial(delattr, module, "get_prompt")


def trainable_layers(model: nn.Module) -> dict[nn.Module, TrainableLayer]:
    """Every module with trainable parameters of its own; what hides them from the tape is refused."""
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(
                f"{name or 'the model itself'} is compiled (torch.compile), which hides its layers from the tape; "
                "record the model uncompiled."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise UnsupportedModelError(f"{name}: a BatchNorm in training mode mixes sequences; call its eval().")
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        layer = layers[module] = TrainableLayer(name or "the model itself", module, own)
        layer.inside = forward_for(layer.name, module)
        layer.by_operations = layer.inside is None and not _is_known(layer)
    if not layers:
        raise UnsupportedModelError("the model has no trainable parameter.")
    _take_adapters(model, layers)
    return layers


def _take_adapters(model: nn.Module, layers: dict[nn.Module, TrainableLayer]) -> None:
    """Give LoRA on bare parameters to the experts that use it, or to the operations of the wrapper."""
    paths = {module: path for path, module in model.named_modules()}
    for adapter in adapters(model):
        for linear in (adapter.A, adapter.B):
            if linear in layers:
                layers[linear].user, layers[linear].by_operations = adapter.wrapper, not adapter.of_experts
        if adapter.of_experts:
            adapter.refuse_odd()
            base, path = adapter.base, paths[adapter.base]
            layer = layers.setdefault(base, TrainableLayer(path, base, {}))
            layer.inside = forward_for(path, base)
            layer.adapters.setdefault(adapter.parameter_name, []).append(adapter)


def _is_known(layer: TrainableLayer) -> bool:
    """Whether a rule covers the module; what is called a norm must be one whose gain is w or 1 + w."""
    rule = rule_for(layer.module)
    if rule is None or rule.gradients is not rms_norm:
        return rule is not None
    try:
        gain_offset(layer.module)
    except UnsupportedModelError:
        return False
    return True


CONTAINERS = (nn.ParameterDict, nn.ParameterList, nn.ModuleDict, nn.ModuleList, nn.Sequential)
USED_BY_PARENTS = (*CONTAINERS, nn.Conv1d, nn.Conv2d)
"""Modules whose parameters may be used by the module that they are a part of, without a call."""


def by_operations(model: nn.Module) -> dict[str, str]:
    """Paths and classes of the trainable modules without a rule, whose gradients are taken operation by operation."""
    layers = trainable_layers(model).values()
    return {layer.name: type(layer.module).__name__ for layer in layers if layer.by_operations}


def scopes(model: nn.Module, layers: Iterable[TrainableLayer]) -> dict[nn.Module, tuple[str, list[TrainableLayer]]]:
    """The modules in whose forwards the operations on parameters without a rule are seen, and whose these are."""
    modules, result = dict(model.named_modules()), dict[nn.Module, tuple[str, list[TrainableLayer]]]()
    for layer in layers:
        name = layer.name if layer.module is not model else ""
        module = layer.module
        table = isinstance(module, nn.Embedding) and "Position" in type(module).__name__  # one for all rows
        if table or layer.user is not None or isinstance(module, USED_BY_PARENTS):
            while name and (module is layer.module or isinstance(module, CONTAINERS)):
                name = name.rpartition(".")[0]
                module = modules[name]
        result.setdefault(module, (name or "the model itself", []))[1].append(layer)
    return result


def around(model: nn.Module, layers: Iterable[TrainableLayer]) -> dict[str, nn.Module]:
    """The modules of these layers and all modules that these are parts of, by path."""
    names = [f"{layer.name}." for layer in layers]
    modules = model.named_modules() if names else ()
    return {
        path or "the model itself": module
        for path, module in modules
        if not path or any(name.startswith(f"{path}.") for name in names)
    }


def while_running(module: nn.Module, start: Callable[[], None], end: Callable[[], None]) -> Iterator[RemovableHandle]:
    """Call these before and after the module's forward, whatever becomes of it."""
    # FSDP gathers a module's parameters in a hook of its own, which must come first.
    yield module.register_forward_pre_hook(lambda *_: start(), prepend=not wrapped_by_fsdp(module))
    yield module.register_forward_hook(lambda *_: end(), always_call=True)
