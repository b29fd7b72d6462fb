"""Log-probabilities from the hidden states, without ever holding all logits: for vocabularies of 100,000 and more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo.scores.contributions import Contribution, Recomputed, Vector, chunks, wide
from oblrpo.scores.recorder import ACTIVE
from oblrpo.scores.rules import linear
from oblrpo.scores.taps import Use


def chunked_logps(head: nn.Linear, hidden_STC: Tensor, target_ST: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target token, (S, T), from a few sequences' logits at a time.

    It is log softmax(head(hidden_t) / temperature)[target_t].

    The backward makes the logits again, and so do a tape's norms and gradient: about one more head product each, for
    S T V numbers less. Inside a `ScoreTape` of the model the head counts as called. What the model does to logits after
    the head (soft-capping, scaling) is not done here.

    Args:
        head: the output layer, (V, C).
        hidden_STC: its input.
        target_ST: token ids.
        temperature: divides the logits.

    Products are taken in the head's own type, whatever autocast says.

    Raises:
        TypeError: the head is no plain `nn.Linear`.
        ValueError: the shapes do not fit.
        RuntimeError: (from `norm2` or `accumulate`) the head's weight was changed after the forward.
    """
    if type(head) is not nn.Linear:
        raise TypeError(f"chunked_logps needs an nn.Linear head, got {type(head).__name__}.")
    if hidden_STC.ndim != 3 or hidden_STC.shape[:2] != target_ST.shape or hidden_STC.shape[2] != head.in_features:
        raise ValueError(
            f"hidden_STC {tuple(hidden_STC.shape)}, target_ST {tuple(target_ST.shape)} and a head of "
            f"{head.in_features} columns do not fit."
        )
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    use: Use | None = None
    root: Tensor | None = None
    for recorder in reversed(ACTIVE):
        owner = recorder.owner_of(head)
        if owner is not None and torch.is_grad_enabled():
            use = recorder.use(owner, linear, dict(owner.parameters), hidden_STC, (*target_ST.shape, head.out_features))
            root = recorder.root
            weight, bias = weight.detach(), None if bias is None else bias.detach()
            break
    logps: Tensor = _HeadLogps.apply(hidden_STC, weight, bias, root, target_ST, temperature, use)
    return logps


class _HeadLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        root: Tensor | None,
        target_ST: Tensor,
        temperature: float,
        use: Use | None,
    ) -> Tensor:
        logps, normalisers = [], []
        for rows in chunks(len(hidden), target_ST.shape[1] * len(weight)):
            logits = _logits(hidden[rows], weight, bias, temperature)
            normalisers.append(logits.logsumexp(-1))
            logps.append(logits.gather(-1, target_ST[rows, :, None])[..., 0] - normalisers[-1])
        ctx.save_for_backward(hidden, weight, bias, target_ST, torch.cat(normalisers))
        ctx.temperature, ctx.use = temperature, use
        return torch.cat(logps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_ST,) = grads
        hidden, weight, bias, target_ST, normaliser_ST = ctx.saved_tensors
        hidden = hidden.detach()  # with its graph it would keep a tape alive
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        use: Use | None = ctx.use
        left_of = partial(_logit_gradients, weight=weight, bias=bias, temperature=ctx.temperature)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide(weight[:0]).dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide(weight[:0]).dtype) if need_bias else None
        for rows in chunks(len(hidden), target_ST.shape[1] * len(weight)):
            left = left_of(hidden[rows], target_ST[rows], normaliser_ST[rows], grad_ST[rows])
            if grad_hidden is not None:
                grad_hidden[rows] = left.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight += left.flatten(0, 1).mT @ wide(hidden[rows]).flatten(0, 1)
            if grad_bias is not None:
                grad_bias += left.sum((0, 1))
        if use is not None and not use.receiver.only_checks(use, grad_ST):
            with torch.no_grad():
                saved = use.receiver.rows(use, hidden, target_ST, normaliser_ST, grad_ST)
                use.receiver.deliver(use, _contributions(saved, left_of, weight, bias is not None))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *[None] * 4,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):  # the same in the forward and whenever made again
        return wide(torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)) / temperature


def _logit_gradients(
    hidden: Tensor,
    target_ST: Tensor,
    normaliser_ST: Tensor,
    grad_ST: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient at the head's output, grad_t (onehot(target_t) - softmax) / temperature, (S, T, V)."""
    share_ST1 = (wide(grad_ST) / temperature)[..., None]
    left = (_logits(hidden, weight, bias, temperature) - normaliser_ST[..., None]).exp_().mul_(-share_ST1)
    return left.scatter_add_(-1, target_ST[..., None], share_ST1)


def _contributions(
    saved: list[Tensor], left_of: Callable[..., Tensor], weight: Tensor, has_bias: bool
) -> dict[str, Contribution]:
    """The head's share of the score, its left factor made again whenever it is needed."""
    vocabulary, version = len(weight), weight._version

    def left(rows: slice) -> Tensor:
        if weight._version != version:
            raise RuntimeError("the head's weight was changed before the tape had made its logits again.")
        return left_of(*(each[rows] for each in saved))

    hidden = saved[0]
    parts: dict[str, Contribution] = {"weight": Recomputed(left, hidden, vocabulary)}
    if has_bias:
        step = chunks(len(hidden), hidden.shape[1] * vocabulary)
        parts["bias"] = Vector(torch.cat([left(rows).sum(1) for rows in step]))
    return parts
