"""The modules that own the trainable parameters, and the switches of their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oblrpo.scores.experts import Forward, forward_for
from oblrpo.scores.param_wrappers import Adapter, ExpertPart, adapters
from oblrpo.scores.rules import UnsupportedModelError, gain_offset, rms_norm, rule_for, wrapped_by_fsdp


class ParameterPiece:
    """A trainable parameter, or one expert's slice of it, and what the forward has shown of its use."""

    def __init__(self, parameter: nn.Parameter, index: int | None, part: ExpertPart | None = None) -> None:
        self.parameter, self.index = parameter, index
        self._part = part
        self.forget()

    def forget(self) -> None:
        """Forget the last forward, because a new one begins."""
        self.calls = 0
        self.tokens = 0
        self.only_lookups = True

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter's gradient, or of its slice."""
        if self._part is not None:
            return self._part.shape
        return self.parameter.shape if self.index is None else self.parameter.shape[1:]

    @contextmanager
    def wide_grad(self) -> Iterator[Tensor]:
        """The `.grad` to add to, contiguous and in float32 or wider: a short type is rounded once, at the end."""
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        grad: Tensor = parameter.grad
        if self._part is not None:
            grad = grad[self._part.place]
        elif self.index is not None:
            grad = grad[self.index]
        dtype = torch.promote_types(grad.dtype, torch.float32)
        as_it_is = grad.dtype == dtype and grad.is_contiguous()
        added = grad if as_it_is else torch.zeros(grad.shape, dtype=dtype, device=grad.device)
        yield added
        if added is not grad:
            grad += added


class TrainableLayer:
    """A module with trainable parameters of its own, and the switches of its forward."""

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.inside: Forward | None = None
        self.by_operations = False  # no rule: see `operations`
        self.adapters: dict[str, list[Adapter]] = {}  # of its parameters, by name: see `param_wrappers`
        self.user: nn.Module | None = None  # uses the parameters without a call: see `param_wrappers`
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
