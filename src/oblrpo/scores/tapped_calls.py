"""Taps on recorded calls, and what receives the output gradients that they see in the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oblrpo.scores.contributions import Contribution
from oblrpo.scores.experts import Dispatch
from oblrpo.scores.layout import Layout, take
from oblrpo.scores.operations import Operation
from oblrpo.scores.rules import Gradients, LayerCall, UnsupportedModelError
from oblrpo.scores.stores import Sink
from oblrpo.scores.trainable_layers import ParameterPiece, TrainableLayer


class ShareCollector:
    """Turns what the taps of one backward see into shares of the score, and hands every parameter's to its store."""

    def __init__(self) -> None:
        self._layout: Layout | None = None  # None: no backward of ours is running
        self._stores: Mapping[ParameterPiece, Sink] = {}
        self._pending: dict[ParameterPiece, list[Contribution]] = {}
        self._delivered: list[ParameterPiece] = []
        self._chosen_S: Tensor | None = None  # rows of a backward that only checks that rows do not mix
        self._mixing: list[tuple[str, Tensor]] = []

    def expect(self, layout: Layout, stores: Mapping[ParameterPiece, Sink]) -> None:
        """Begin a backward whose shares go to these stores."""
        self.forget()
        self._layout, self._stores = layout, stores

    def refuse_mixed(self, logps_S: Tensor, root: Tensor, layout: Layout, chosen_S: Tensor) -> None:
        """Run the backward of the chosen entries of logps_S, in which other rows may not matter to any layer.

        Raises:
            UnsupportedModelError: they do.
        """
        self.expect_rows(layout, chosen_S)
        try:
            with torch.autocast(logps_S.device.type, enabled=False):
                torch.autograd.grad(logps_S, root, chosen_S.to(logps_S), retain_graph=True, allow_unused=True)
            mixes = self.first_that_mixes()
        finally:
            self.forget()
        if mixes is not None:
            raise UnsupportedModelError(
                f"{mixes}: entries of logps_S depend on other rows of this layer than their own; they are in another "
                "order than the rows, the layer runs time-first, or sequences mix."
            )

    def expect_rows(self, layout: Layout, chosen_S: Tensor) -> None:
        """Begin a backward of the chosen sequences' log-probabilities, which only checks that no other row matters."""
        self.forget()
        self._layout, self._chosen_S = layout, chosen_S

    def forget(self) -> None:
        """End the backward: what it left would live on through the next micro-batch."""
        self._layout, self._stores, self._pending, self._delivered = None, {}, {}, []
        self._chosen_S, self._mixing = None, []

    @torch.no_grad()
    def receive(self, call: TappedCall, input: Tensor, output: Tensor | None, grad: Tensor) -> None:
        """Take in the input, the output and the output gradient of a call."""
        input, grad_rows, *outputs = self.rows(call, input, grad, *([] if output is None else [output]))
        if self._layout is not None and call.dispatch is None:
            self._layout.watch(grad)
        self.deliver(call, call.gradients(LayerCall(call.layer.module, input, *outputs), grad_rows))

    @torch.no_grad()
    def receive_operation(self, call: TappedCall, operation: Operation, saved: list[Tensor], grad: Tensor) -> None:
        """Take in the activations and the output gradient of an operation."""
        self.rows(call, grad)
        self.deliver(call, operation.gradients(saved, grad))

    def only_checks(self, call: TappedCall, grad: Tensor) -> bool:
        """Whether this backward only checks that rows do not mix; if so, the call's output gradient is looked at."""
        if self._chosen_S is None:
            return False
        (rows,) = self.rows(call, grad)
        largest_S = torch.linalg.vector_norm(rows.flatten(1), ord=torch.inf, dim=1)
        self._mixing.append((call.layer.name, ((largest_S > 0) & ~self._chosen_S).any()))
        return True

    def first_that_mixes(self) -> str | None:
        """Name of the layer nearest to the log-probabilities whose other rows mattered, or None."""
        if not self._mixing or not bool(torch.stack([mixes for _, mixes in self._mixing]).any()):
            return None
        return next(name for name, mixes in self._mixing if bool(mixes))

    def rows(self, call: TappedCall, *activations: Tensor) -> list[Tensor]:
        """A call's activations as (S, T, ...).

        Raises:
            UnsupportedModelError: their leading axes are not understood, or the backward is not one of ours.
        """
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
                return [layout.blocks(each, call.operation.rows) for each in activations]
            if call.dispatch is None:
                return [layout.rows(each) for each in activations]
            index_ST = layout.rows_at(call.dispatch.token_N, call.dispatch.tokens)
            return [take(each, index_ST) for each in activations]
        except ValueError as error:
            raise UnsupportedModelError(
                f"{call.layer.name}: got {error}; activations must lead with batch rows, or with rows times tokens."
            ) from None

    def deliver(self, call: TappedCall, parts: Mapping[str, Contribution]) -> None:
        """Give shares to their pieces, and complete pieces to their stores.

        Raises:
            UnsupportedModelError: a share is missing.
        """
        for name, piece in call.pieces.items():
            if name not in parts:
                raise UnsupportedModelError(
                    f"{call.layer.name}: its rule gives no gradient for {name} (a parametrised weight?)."
                )
            pending = self._pending.setdefault(piece, [])
            pending.append(parts[name])
            if len(pending) == piece.calls:
                self._complete(piece)

    def complete(self) -> list[ParameterPiece]:
        """Complete the pieces with calls whose output did not matter; return all that got shares.

        Raises:
            UnsupportedModelError: a token that belongs to no sequence mattered.
        """
        if self._layout is not None and self._layout.strays():
            raise UnsupportedModelError(
                "tokens that sequence_ids gives to no sequence change logps_S: through attention, or an entry of it."
            )
        for piece in list(self._pending):
            self._complete(piece)
        return self._delivered

    def _complete(self, piece: ParameterPiece) -> None:
        self._stores[piece].take(self._pending.pop(piece))
        self._delivered.append(piece)


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
        """Pass the gradient on.

        Raises:
            UnsupportedModelError: an activation was changed in place.
            RuntimeError: autograd's own.
        """
        (grad,) = grads
        call: TappedCall = ctx.call
        if grad is None:
            return None, None, None, *(None for _ in ctx.needs_input_grad[3:])
        try:
            # Unpacked in a check of rows, too: what checkpointing has made again for the tap is let go only then.
            saved = [each.detach() for each in ctx.saved_tensors]  # one with its graph would keep the tape alive
        except RuntimeError as error:
            if "inplace" in str(error):
                raise UnsupportedModelError(
                    f"{call.layer.name}: its input or output was changed in place after the call."
                ) from None
            raise
        if call.collector.only_checks(call, grad):
            pass
        elif call.operation is not None:
            call.collector.receive_operation(call, call.operation, saved, grad)
        else:
            call.collector.receive(call, saved[0], saved[1] if len(saved) > 1 else None, grad)
        return grad, None, None, *(None for _ in ctx.needs_input_grad[3:])
