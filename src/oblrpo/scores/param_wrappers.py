"""LoRA on experts that are bare parameters, through PEFT's `ParamWrapper` (`LoraConfig(target_parameters=...)`).

While the wrapper runs, the weight of every expert e is W_e + c P_e Q_e. Nobody calls P and Q: PEFT adds their product
to the weights. The recorded forward of the experts (`experts`) tells each expert's inputs and output gradients, that is
G_e = sum_t l_t r_t', the gradient of its weight. Then that of P_e is c sum_t l_t (Q_e r_t)', and that of Q_e is
c sum_t (P_e' l_t) r_t': factors of the adapter's rank, and the experts' own gradients are never multiplied out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oblrpo.scores.contributions import Contribution, Outer, wide
from oblrpo.scores.experts import is_experts
from oblrpo.scores.rules import Gradients, LayerCall, UnsupportedModelError, product

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Of weights to which PEFT adds the product as it is."""


class ExpertPart(NamedTuple):
    """An expert's part of a matrix that holds those of all experts."""

    place: tuple[slice, slice]
    shape: torch.Size


@dataclass(frozen=True)
class Adapter:
    """One adapter of a module's parameter, with the matrices A and B."""

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

    def parts(self, expert: int) -> dict[str, ExpertPart]:
        """The expert's parts of A and B."""
        count = self.wrapper.num_experts
        (rows, inputs), outputs = self.A.weight.shape, self.B.weight.shape[0]
        r = rows // count
        return {
            "A": ExpertPart((slice(expert * r, (expert + 1) * r), slice(None)), torch.Size((r, inputs))),
            "B": ExpertPart((slice(None), slice(expert, None, count)), torch.Size((outputs, r))),
        }

    def rule(self, expert: int, role: str) -> Gradients:
        """The gradients of the expert's parts from a product with its weight, or ("transposed") with its transpose."""
        parts, scale = self.parts(expert), float(self.wrapper.scaling[self.name])
        A, B = self.A.weight.detach()[parts["A"].place], self.B.weight.detach()[parts["B"].place]
        weights_are_rows = self.wrapper._did_swap_in_out_features  # (experts, out, in)

        def gradients(call: LayerCall, grad: Tensor) -> dict[str, Contribution]:
            weight = product(call, grad)[role]
            assert isinstance(weight, Outer)
            left, right = weight.left, weight.right
            if not weights_are_rows:  # the weight's transpose has the product B A
                left, right = right, left
            r, outputs = len(A), len(B)
            return {
                "A": Outer(scale * (wide(left) @ wide(B)), right, rows=r),
                "B": Outer(left, scale * (wide(right) @ wide(A).mT), rows=outputs),
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
