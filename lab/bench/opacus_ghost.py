"""Opacus' per-sample gradient norms: a backward for the norms, then a second one with the coefficients.

Opacus clips per-sample gradients for private training; the norms are what it clips by. "Ghost" takes the norm of a
linear layer from T x T Gram products, "fast gradient" multiplies out the per-sample gradients of one layer at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lab.bench.workload import Workload


class TiedLinear(nn.Linear):
    """A linear layer for which Opacus has no ghost rule."""


class TiedEmbedding(nn.Embedding):
    """An embedding for which Opacus has no ghost rule."""


def missing() -> str | None:
    """Why Opacus cannot run here, or None."""
    if importlib.util.find_spec("opacus") is None:
        return "opacus is not installed (pip install opacus)"
    return None


def run(workload: Workload, hooks: Any) -> Tensor:
    """The two backwards, as `opacus.utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping` does them."""
    logps_S = workload.logps()
    logps_S.sum().backward(retain_graph=True)
    workload.model.zero_grad()  # Opacus' first backward makes the parameters' gradients too, and drops them
    norm2_S: Tensor = hooks.get_norm_sample().square()
    hooks.disable_hooks()
    (logps_S * workload.coef_S).sum().backward()
    hooks.enable_hooks()
    return norm2_S


@contextmanager
def hooked(model: Any, ghost: bool) -> Iterator[Any]:
    """The model with Opacus' hooks, its own again afterwards.

    Its ghost rules refuse a weight that two modules share: their norms would miss the cross term. So a tied embedding
    and head get their per-sample gradients multiplied out by Opacus' other rules, and the norms are exact.
    """
    grad_sample = _with_rules(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = ghost and head.weight is embedding.weight
    if tied:
        head.__class__, embedding.__class__ = TiedLinear, TiedEmbedding
    hooks = grad_sample.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", use_ghost_clipping=ghost)
    model.train()  # Opacus records in training mode only; there is no dropout
    try:
        yield hooks
    finally:
        hooks.to_standard_module()
        model.eval()
        if tied:
            head.__class__, embedding.__class__ = nn.Linear, nn.Embedding
        for module in model.modules():
            vars(module).pop("activations", None)  # an empty list that Opacus leaves behind


def _with_rules(model: Any) -> Any:
    """Opacus with what its users would have to add for this model."""
    grad_sample = importlib.import_module("opacus.grad_sample")
    samplers = grad_sample.GradSampleModuleFastGradientClipping.GRAD_SAMPLERS
    grad_sample.register_grad_sampler(TiedLinear)(samplers[nn.Linear])
    grad_sample.register_grad_sampler(TiedEmbedding)(samplers[nn.Embedding])
    for kind in {type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}:
        grad_sample.register_grad_sampler(kind)(_gain_gradients)
        grad_sample.register_norm_sampler(kind)(_gain_norms)
    return grad_sample


def _gain_gradients(module: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a gain: the normalised input times the output's gradient, summed over positions."""
    x = activations[0].float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return {module.weight: (x.to(backprops.dtype) * backprops).flatten(1, -2).sum(1)}


def _gain_norms(module: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    gradients = _gain_gradients(module, activations, backprops)
    return {parameter: gradient.norm(dim=1) for parameter, gradient in gradients.items()}
