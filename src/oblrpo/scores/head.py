"""Log-probabilities from the hidden states, without ever holding all logits: for vocabularies of 100,000 and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oblrpo.scores import contributions
from oblrpo.scores.contributions import Contribution, Recomputed, Vector, chunks, in_one_type, scaled, short_type, wide
from oblrpo.scores.recorder import ACTIVE
from oblrpo.scores.rules import linear
from oblrpo.scores.tapped_calls import TappedCall

ALL = slice(None)


class TokenLogps(NamedTuple):
    """What the head's distribution says of each token."""

    logp_ST: Tensor
    """The log-probability of each target, differentiable."""
    entropy_ST: Tensor
    """The distribution's entropy, in nats, as a constant."""
    logit_norm2_ST: Tensor
    """`scores.logit_norm2` of each target, as a constant."""


def chunked_logps(head: nn.Linear, hidden_STC: Tensor, target_ST: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target token, (S, T): the first result of `token_logps`."""
    return token_logps(head, hidden_STC, target_ST, temperature).logp_ST


def token_logps(head: nn.Linear, hidden_STC: Tensor, target_ST: Tensor, temperature: float = 1.0) -> TokenLogps:
    """Log-probability, entropy and logit norm of each target token, from a few sequences' logits at a time.

    It is log softmax(head(hidden_t) / temperature)[target_t], and the entropy of that softmax.

    Of S T V numbers, the gradient of the hidden states needs the product of the probabilities with the head, which is
    taken at once where the head has no gradient in this backward: it is frozen, or its tape's. The head's own gradient,
    and a tape's norms, need the probabilities. They are kept, once, while they take no more than the head's own
    gradient in float32, S T <= C (2 C in bfloat16, as a GPU keeps them), or than one temporary. Otherwise they are made
    again, at the cost of about one more head product each.
    Inside a `ScoreTape` of the model the head counts as called. What the model does to logits after the head
    (soft-capping, scaling) is not done here.

    Args:
        head: the output layer, (V, C).
        hidden_STC: its input.
        target_ST: token ids.
        temperature: divides the logits.

    The product with the head is taken in the type that autocast says, without autocast in the head's own.

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
    call: TappedCall | None = None
    root: Tensor | None = None
    for recorder in reversed(ACTIVE):
        layer = recorder.layers.get(head)
        if layer is not None and torch.is_grad_enabled():
            call = recorder.tapped_call(layer, linear, dict(layer.parameters), (*target_ST.shape, head.out_features))
            root = recorder.root
            weight, bias = weight.detach(), None if bias is None else bias.detach()
            break
    dtype, device = weight.dtype, weight.device.type
    if torch.is_autocast_enabled(device) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device)
    product = _Product(weight.detach().to(dtype), None if bias is None else bias.detach(), temperature, dtype)
    return TokenLogps(*_HeadLogps.apply(hidden_STC, weight, bias, root, target_ST, product, call))


@dataclass(frozen=True)
class _Product:
    """The product with the head, the same in the forward and whenever it is made again."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    dtype: torch.dtype

    @property
    def short(self) -> torch.dtype | None:
        """The type of gradients at the logits where it is a short one: that of autograd, on CUDA."""
        return short_type(self.weight)

    def elements(self, tokens: int) -> int:
        """How many numbers of the head's own gradient, in float32 or wider, take as much as those of so many tokens."""
        return tokens * len(self.weight) // (1 if self.short is None else 2)

    def logits(self, hidden: Tensor, columns: slice | Tensor = ALL) -> Tensor:
        """Logits over the temperature, of all of the vocabulary or of some, in float32 or wider."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias[columns].to(self.dtype)
            product = torch.nn.functional.linear(hidden.to(self.dtype), self.weight[columns].to(self.dtype), bias)
        product = wide(product)
        return product if self.temperature == 1 else product / self.temperature

    def gradients(
        self,
        columns: slice | Tensor,
        hidden: Tensor,
        target_ST: Tensor,
        normaliser_ST: Tensor,
        grad_ST: Tensor,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Gradient at some of the head's outputs, grad_t (onehot(target_t) - softmax) / temperature, (S, T, n).

        What is kept is softmax - onehot, which rounds to a short type without losing the targets that are nearly sure.
        """
        share_ST1 = (wide(grad_ST) / self.temperature)[..., None]
        if kept is not None:
            return scaled(kept[..., columns], -share_ST1, self.short)
        left = self.logits(hidden, columns).sub_(normaliser_ST[..., None]).exp_().mul_(-share_ST1)
        if isinstance(columns, Tensor):
            left.add_(share_ST1 * (target_ST[..., None] == columns))
        else:
            place_ST1 = target_ST[..., None] - (columns.start or 0)
            inside = (place_ST1 >= 0) & (place_ST1 < left.shape[-1])
            left.scatter_add_(-1, torch.where(inside, place_ST1, 0), share_ST1 * inside)
        return left if self.short is None else left.to(self.short)


class _HeadLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        root: Tensor | None,
        target_ST: Tensor,
        product: _Product,
        call: TappedCall | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        V, need_hidden, need_own = len(weight), ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        target_N, hidden_NC = target_ST.flatten(), hidden.flatten(0, 1)
        fits = product.elements(len(target_N)) <= max(weight.numel(), contributions.CHUNK_ELEMENTS)
        kept: Tensor | None = None
        # A token's gradient goes one way, whatever its size.
        way_NC = torch.empty_like(hidden_NC) if need_hidden and not need_own else None
        # Made before the pieces, between whose logits it would lie: the C library would find no room for the next.
        found_4N = wide(product.weight[:0]).new_empty(4, len(target_N))
        for tokens in _pieces(len(target_N), V, hidden):
            logits = product.logits(hidden_NC[tokens])
            if kept is None and fits and (need_own or (need_hidden and call is not None)):
                kept = logits.new_empty(len(target_N), V, dtype=product.short)
            left = None if kept is None else kept[tokens]
            if left is None and way_NC is not None:
                left = logits.new_empty(logits.shape, dtype=product.short)
            found_4N[:, tokens] = torch.stack(_statistics(logits, target_N[tokens], left))
            if way_NC is not None and left is not None:
                way_NC[tokens] = left.to(product.dtype) @ product.weight
            del logits, left
        logp_ST, entropy_ST, norm2_ST, normaliser_ST = (each_N.clone().view_as(target_ST) for each_N in found_4N)
        if kept is not None:
            kept = kept.view(*target_ST.shape, V)
        ctx.save_for_backward(hidden, weight, bias, target_ST, normaliser_ST, kept, way_NC)
        ctx.product, ctx.call = product, call
        ctx.mark_non_differentiable(entropy_ST, norm2_ST)
        ctx.set_materialize_grads(False)
        return logp_ST, entropy_ST, norm2_ST

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad_ST = grads[0]
        hidden, weight, bias, target_ST, normaliser_ST, kept, way_NC = ctx.saved_tensors
        if grad_ST is None:
            return (None,) * 7
        if torch.is_grad_enabled():  # create_graph: somebody wants to differentiate once more
            return *_differentiable(ctx, hidden, weight, bias, target_ST, grad_ST), *[None] * 4
        hidden = hidden.detach()  # with its graph it would keep a tape alive
        call: TappedCall | None = ctx.call
        product: _Product = ctx.product
        saved = [hidden, target_ST, normaliser_ST, grad_ST, *([] if kept is None else [kept])]
        if way_NC is not None:
            share_ST1 = grad_ST[..., None] / -product.temperature
            grad_hidden: Tensor | None = scaled(way_NC.view_as(hidden), share_ST1, None).to(hidden.dtype)
            grad_weight = grad_bias = None
        else:
            flat = [tensor.flatten(0, 1) for tensor in saved]
            grad_hidden, grad_weight, grad_bias = _gradients(product, flat, weight, ctx.needs_input_grad)
        left_of = product.gradients
        if call is not None and not call.collector.is_row_check(call, grad_ST):
            with torch.no_grad():
                in_rows = call.collector.rows(call, *saved)
                call.collector.deliver(call, _contributions(in_rows, left_of, weight, bias is not None))
        grad_hidden = None if grad_hidden is None else grad_hidden.view_as(hidden)
        return grad_hidden, grad_weight, grad_bias, *[None] * 4


LEAST_TOKENS = 256
"""Tokens whose logits are made together on a CPU, however large the vocabulary: of fewer, reading and writing what has
the head's size would take more of a product's time than a twelfth."""


def _pieces(tokens: int, vocabulary: int, like: Tensor, own: int = 0) -> Iterator[slice]:
    """Slices of so many tokens whose logits may be there at once, all but the last alike: one fits where one was."""
    least = max(contributions.CHUNK_ELEMENTS, LEAST_TOKENS * vocabulary)
    several = len([*chunks(tokens, vocabulary, like, own, least)])
    step = -(-tokens // max(1, several))
    return (slice(start, start + step) for start in range(0, tokens, max(1, step)))


def _gradients(
    product: _Product, saved: list[Tensor], weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states, weight and bias that are needed, from what was saved of every token, (N, ...)."""
    hidden, dtype = saved[0], wide(weight[:0]).dtype
    grad_hidden = torch.empty_like(hidden) if needed[0] else None
    grad_bias = torch.zeros(len(weight), dtype=dtype, device=weight.device) if needed[2] else None
    grad_weight: Tensor | None = None
    for tokens in _pieces(len(hidden), product.elements(1), hidden, weight.numel()):
        left = product.gradients(ALL, *(tensor[tokens] for tensor in saved))
        if grad_hidden is not None:
            grad_hidden[tokens] = left.to(product.dtype) @ product.weight
        if needed[1]:
            first, second = in_one_type(left.mT, hidden[tokens])
            if grad_weight is None:
                grad_weight = contributions.matmul(first, second)  # its only name: autograd adds others' shares to it
            elif first.dtype == grad_weight.dtype:
                grad_weight.addmm_(first, second)
            else:
                grad_weight += contributions.matmul(first, second)
        if grad_bias is not None:
            grad_bias += left.sum(0, dtype=dtype)
    of_weight, of_bias = (None if grad is None else grad.to(weight.dtype) for grad in (grad_weight, grad_bias))
    return grad_hidden, of_weight, of_bias


def _differentiable(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ST: Tensor, grad_ST: Tensor
) -> list[Tensor | None]:
    """The gradients by autograd's own functions, which know their derivatives, from all logits at once."""
    product = replace(ctx.product, weight=weight, bias=bias)
    logp_ST = product.logits(hidden).log_softmax(-1).gather(-1, target_ST[..., None])[..., 0]
    inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
    needed = [tensor for tensor, needs in inputs if needs and tensor is not None]
    grads = iter(torch.autograd.grad(logp_ST, needed, grad_ST, create_graph=True))
    return [next(grads) if needs else None for needs in ctx.needs_input_grad[:3]]


def _statistics(logits: Tensor, target_ST: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, logit norm and normaliser of each token; its logits are used up.

    softmax - onehot is written to `kept`, if there is one.
    """
    index = target_ST[..., None]
    normaliser_ST = logits.logsumexp(-1)
    logp_STV = logits.sub_(normaliser_ST[..., None])
    logp_ST = logp_STV.gather(-1, index)[..., 0]
    p_STV = torch.exp(logp_STV, out=kept) if kept is not None and kept.dtype == logits.dtype else logp_STV.exp()
    entropy_ST = -logp_STV.mul_(p_STV).sum(-1)
    target_p = p_STV.gather(-1, index)
    others_STV = p_STV.scatter_(-1, index, 0)  # summed without the target: one near 1 would cost them their digits
    norm2_ST = others_STV.sum(-1).square() + torch.linalg.vector_norm(others_STV, dim=-1).square()
    if kept is not None:
        p_STV.scatter_(-1, index, target_p - 1)
        if kept is not p_STV:
            kept.copy_(p_STV)
    return logp_ST, entropy_ST, norm2_ST, normaliser_ST


def _contributions(
    saved: list[Tensor], left_of: Callable[..., Tensor], weight: Tensor, has_bias: bool
) -> dict[str, Contribution]:
    """The head's share of the score, its left factor made again whenever it is needed."""
    vocabulary, version = len(weight), weight._version

    def left(rows: slice, columns: slice | Tensor) -> Tensor:
        if weight._version != version:
            raise RuntimeError("the head's weight was changed before the tape had made its logits again.")
        return left_of(columns, *(tensor[rows] for tensor in saved))

    hidden = saved[0]
    parts: dict[str, Contribution] = {"weight": Recomputed(left, hidden, vocabulary)}
    if has_bias:
        step = chunks(len(hidden), hidden.shape[1] * vocabulary, hidden)
        parts["bias"] = Vector(torch.cat([left(rows, ALL).sum(1, dtype=wide(hidden[:0]).dtype) for rows in step]))
    return parts
