"""Taps on recorded calls, and what receives the output gradients that they see in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oblrpo.scores.contributions import Contribution
from oblrpo.scores.experts import Dispatch
from oblrpo.scores.layout import Layout, take
from oblrpo.scores.operations import Operation
from oblrpo.scores.rules import Gradients, LayerCall, UnsupportedModelError
from oblrpo.scores.trainable_layers import ParameterPiece, TrainableLayer

Take: TypeAlias = Callable[[ParameterPiece, list[Contribution]], None]
"""Takes in all shares of one parameter, once they have arrived in the backward."""


def take_nothing(piece: ParameterPiece, parts: list[Contribution]) -> None:
    """Take in nothing: of a backward that only checks, and where none is running."""


class ShareCollector:
    """Turns what the taps of one backward see into shares of the score, and hands on every parameter's."""

    def __init__(self) -> None:
        self._end()

    def _end(self) -> None:
        # What a backward left would live on through the next micro-batch.
        self._layout: Layout | None = None  # None: no backward of ours is running
        self._take: Take = take_nothing
        self._pending: dict[ParameterPiece, list[Contribution]] = {}
        self._chosen_S: Tensor | None = None  # rows of a backward that only checks that rows do not mix
        self._mixing: list[tuple[str, Tensor]] = []

    @contextmanager
    def collecting(
        self, layout: Layout, take: Take = take_nothing, chosen_S: Tensor | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Run a backward inside, whose shares are taken in.

        With chosen rows it only checks: the list that is given gets, by layer, whether any other row mattered.
        """
        self._end()
        self._layout, self._take, self._chosen_S = layout, take, chosen_S
        try:
            yield self._mixing
        finally:
            self._end()

    @torch.no_grad()
    def receive(self, call: TappedCall, saved: list[Tensor], grad: Tensor) -> None:
        """Take in what the call's tap has saved (input and output, or an operation's activations), and its gradient."""
        if self.is_row_check(call, grad):
            return
        if call.operation is not None:
            self.rows(call, grad)  # refuses what it does not understand
            self.deliver(call, call.operation.gradients(saved, grad))
            return
        input, grad_rows, *outputs = self.rows(call, saved[0], grad, *saved[1:])
        if self._layout is not None and call.dispatch is None:
            self._layout.watch(grad)
        self.deliver(call, call.gradients(LayerCall(call.layer.module, input, *outputs), grad_rows))

    def is_row_check(self, call: TappedCall, grad: Tensor) -> bool:
        """Whether this backward only checks that rows do not mix; if so, the call's output gradient is looked at."""
        if self._chosen_S is None:
            return False
        (rows,) = self.rows(call, grad)
        largest_S = torch.linalg.vector_norm(rows.flatten(1), ord=torch.inf, dim=1)
        self._mixing.append((call.layer.name, ((largest_S > 0) & ~self._chosen_S).any()))
        return True

    def rows(self, call: TappedCall, *activations: Tensor) -> list[Tensor]:
        """A call's activations as (S, T, ...); what cannot be assigned to sequences is refused."""
        layout = self._layout
        if layout is None:
            raise UnsupportedModelError(
                "a backward other than that of ScoreTape.record ran through a recorded forward."
            )
        if call.recomputed:
            raise UnsupportedModelError(
                f"{call.layer.name}: an autograd function of another library runs this layer again in its own backward "
                "(activation checkpointing?); the tape cannot follow it. Checkpoint with torch's use_reentrant=False."
            )
        try:
            if call.operation is not None:
                return [layout.blocks(activation, call.operation.rows) for activation in activations]
            if call.dispatch is None:
                return [layout.rows(activation) for activation in activations]
            index_ST = layout.rows_at(call.dispatch.token_N, call.dispatch.tokens)
            return [take(activation, index_ST) for activation in activations]
        except ValueError as error:
            raise UnsupportedModelError(
                f"{call.layer.name}: got {error}; activations must lead with batch rows, or with rows times tokens."
            ) from None

    def deliver(self, call: TappedCall, parts: Mapping[str, Contribution]) -> None:
        """Give shares to their pieces, and hand on complete pieces."""
        for name, piece in call.pieces.items():
            if name not in parts:
                raise UnsupportedModelError(
                    f"{call.layer.name}: its rule gives no gradient for {name} (a parametrised weight?)."
                )
            pending = self._pending.setdefault(piece, [])
            pending.append(parts[name])
            if len(pending) == piece.calls:
                self._take(piece, self._pending.pop(piece))

    def complete(self) -> None:
        """Complete the pieces with calls whose output did not matter."""
        if self._layout is not None and self._layout.strays():
            raise UnsupportedModelError(
                "tokens that sequence_ids gives to no sequence change logps_S: through attention, or an entry of it."
            )
        for piece, parts in self._pending.items():
            self._take(piece, parts)


@dataclass(frozen=True)
class TappedCall:
    """One tapped call: whose it was, by which rule its gradients come, of which parameters, for which tokens."""

    collector: ShareCollector
    layer: TrainableLayer
    gradients: Gradients
    pieces: dict[str, ParameterPiece]
    dispatch: Dispatch | None
    operation: Operation | None
    """The single operation, of a module without a rule, that the tap is on."""
    recomputed: bool
    """Whether the call ran inside a backward. Under torch's checkpointing the backward passes the first call's tap."""


class OutputTap(torch.autograd.Function):
    """Identity on `output`; its backward shows the call's input and output gradient to the collector."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor, call: TappedCall, *saved: Tensor) -> Tensor:
        """Pass the output on, saving what the call's rule will need."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Pass the gradient on. An activation that was changed in place is refused."""
        (grad,) = grads
        call: TappedCall = ctx.call
        if grad is not None:
            try:
                # Unpacked in a check of rows, too: what checkpointing has made again for the tap is let go only then.
                # Detached, as one with its graph would keep the tape alive.
                saved = [tensor.detach() for tensor in ctx.saved_tensors]
            except RuntimeError as error:
                if "inplace" in str(error):
                    raise UnsupportedModelError(
                        f"{call.layer.name}: its input or output was changed in place after the call."
                    ) from None
                raise
            call.collector.receive(call, saved, grad)
        return grad, None, None, *(None for _ in ctx.needs_input_grad[3:])
