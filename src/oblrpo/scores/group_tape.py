"""The group tape: the gradient under coefficients that are known beforehand, and every group's own norm.

Where coefficients do not wait for score norms, they go into the backward, as in any training step: what reaches a layer
is a_s B_s, whose product with the inputs is the gradient. Products are taken group by group, which is as many
multiplications as one for the whole batch, and a group's norm costs one more pass over its product. Nothing is kept
of single outputs, and nothing beyond the layer that the backward has reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oblrpo.scores.contributions import sum_in_widest
from oblrpo.scores.layout import Layout
from oblrpo.scores.recorder import ForwardRecorder, foreign_functions, nodes, why_nothing_was_recorded
from oblrpo.scores.rules import UnsupportedModelError, wrapped_by_fsdp
from oblrpo.scores.stores import Sums
from oblrpo.scores.trainable_layers import ParameterPiece

Self = TypeVar("Self", bound="RecordingTape")
Groups: TypeAlias = int | Sequence[int]
"""How many sequences are in each group: as many in all, or of each its own number. Groups follow each other in rows."""

KEPT_APART: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""The ways (`way_of`) of a model in which its rows were seen to keep apart, whichever tape saw it: a new tape costs no
more."""

NEAR = 64
"""Functions next to the log-probabilities that are distinguished."""


def check_rows(recorder: ForwardRecorder, logps_S: Tensor, layout: Layout) -> None:
    """Run the backward of some entries of logps_S, which must leave every layer's other rows without a gradient.

    It is done once for each way of running the model (`way_of`), and again only where a function that may bring rows
    together by what they hold ran around parameters without a rule. It is left out for sharded models, where all ranks
    would have to, and where the graph holds functions or hooks of other libraries, which may not stand a second
    backward.

    Raises:
        UnsupportedModelError: other rows matter, or may, and cannot be looked at.
    """
    if len(logps_S) < 2:
        return
    recorder.operations.refuse_doubtful()
    may_mix, kept_apart = recorder.operations.may_mix, KEPT_APART.setdefault(recorder.model, set())
    sharded = any(map(wrapped_by_fsdp, recorder.model.modules()))
    way = 0 if sharded else way_of(recorder.model, logps_S, layout, recorder.given)  # those are never looked at
    if way in kept_apart and may_mix is None:
        return
    if recorder.foreign_hooks or sharded or next(foreign_functions(logps_S), None) is not None:
        if may_mix is None:
            return
        why = "parameters are sharded" if sharded else "functions or hooks of other libraries are in the graph"
        raise UnsupportedModelError(
            f"{may_mix} may bring rows of the batch together around parameters without a rule, which cannot be "
            f"looked at where {why}."
        )
    every = any(layer.by_operations for layer in recorder.layers.values())
    for chosen_S in rows_to_check(len(logps_S), logps_S.device, every):
        autocast = torch.autocast(logps_S.device.type, enabled=False)
        with recorder.collector.collecting(layout, {}, chosen_S) as mixing, autocast:
            torch.autograd.grad(logps_S, recorder.root, chosen_S.to(logps_S), retain_graph=True, allow_unused=True)
        if mixing and bool(torch.stack([mixes for _, mixes in mixing]).any()):
            name = next(name for name, mixes in mixing if bool(mixes))  # the nearest to the log-probabilities
            raise UnsupportedModelError(
                f"{name}: entries of logps_S depend on other rows of this layer than their own; they are in another "
                "order than the rows, the layer runs time-first, or sequences mix."
            )
    kept_apart.add(way)


def way_of(model: nn.Module, logps_S: Tensor, layout: Layout, given: tuple[str, ...]) -> int:
    """A number for the way in which a model was run and its log-probabilities made.

    It changes with the modules and their modes, what is trained, the attention that is configured, and the names of the
    arguments that were given. It changes with the shape: packed rows, as many rows as tokens, and two rows alone do not
    speak for others. And it changes with the functions between the last recorded layers and the log-probabilities.
    """
    modules = [(id(module), type(module), module.training, "forward" in vars(module)) for module in model.modules()]
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    attention = [str(getattr(config, "_attn_implementation", None)) for config in configs.values()]
    trained = [(id(parameter), parameter.requires_grad) for parameter in model.parameters()]
    shape = (layout.packed, layout.sequences == layout.tokens, layout.sequences > 2)
    near = frozenset(str(node.name()) for node in islice(nodes(logps_S, into_layers=False), NEAR))
    return hash((*modules, *attention, *trained, *given, shape, near))


def rows_to_check(sequences: int, device: torch.device, every: bool = False) -> list[Tensor]:
    """About half of the rows, (S,), such that in another order they are hardly ever the same rows.

    With `every`, by each binary digit of the row's number those with 1 and those with 0 too, which separate any two.
    """
    golden, row_S = 0.6180339887, torch.arange(sequences, device=device)
    chosen = [(row_S.double() * golden) % 1 >= 0.5]
    for digit in range((sequences - 1).bit_length() if every else 0):
        ones_S = (row_S >> digit) & 1 == 1
        chosen += [ones_S, ~ones_S]
    return chosen


class RecordingTape(ABC):
    """What both tapes do: hook the model within their `with`, and refuse log-probabilities that cannot be recorded.

    Args:
        model: the model to record.
        check_rows: whether `record` checks that rows do not mix.
    """

    def __init__(self, model: nn.Module, check_rows: bool) -> None:
        self.model = model
        self._check_rows, self._used = check_rows, False
        self._recorder = ForwardRecorder(model)
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Let go of what was recorded, and of its memory."""

    def __enter__(self: Self) -> Self:
        self._recorder.start()
        self.forget()
        self._used = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.stop()

    def _refuse_unusable(self, logps_S: Tensor) -> None:
        """Refuse log-probabilities that cannot be recorded."""
        if logps_S.ndim != 1:
            raise ValueError(f"record needs log-probabilities of shape (S,), got {tuple(logps_S.shape)}.")
        if not self._recorder.active:
            raise ValueError("record inside the `with` block.")
        if not logps_S.requires_grad:
            raise ValueError(f"record needs differentiable log-probabilities: {self._why_nothing(logps_S)}")
        if self._used:
            raise ValueError("record once in each `with`; enter the tape again for the next micro-batch.")
        if not self._recorder.pieces:
            raise ValueError(f"nothing to record: {self._why_nothing(logps_S)}")

    def _why_nothing(self, logps_S: Tensor) -> str:
        return why_nothing_was_recorded(logps_S, self._recorder.ran_without_gradients)

    def _sizes(self, coef_S: Tensor, group_size: Groups, S: int) -> list[int]:
        """The size of each group; coefficients and groups that are not of so many sequences are refused."""
        sizes = [group_size] * (S // max(1, group_size)) if isinstance(group_size, int) else list(group_size)
        if coef_S.shape != (S,) or min(sizes, default=0) < 1 or sum(sizes) != S:
            raise ValueError(f"coef_S {tuple(coef_S.shape)} and group_size {group_size} do not fit {S} sequences.")
        return sizes

    def _add_sums(
        self, pieces: Iterable[ParameterPiece], logps_S: Tensor, coef_S: Tensor, layout: Layout, sizes: list[int]
    ) -> list[Tensor]:
        """Run the backward with coefficients, adding up the gradient layer by layer; squared norms of groups, (P,)."""
        sums = {piece: Sums(piece.add, sizes) for piece in pieces}
        with self._recorder.resumed(), torch.enable_grad():
            self._recorder.backward(logps_S, coef_S.to(logps_S.dtype), layout, sums, keep_graph=False)
        return [store.norm2_P for store in sums.values() if store.norm2_P is not None]


class GroupTape(RecordingTape):
    """sum_s a_s grad_theta log pi(o_s|q_s), and || sum_{s in p} a_s grad_theta log pi(o_s|q_s) ||^2 of each group p.

    Use::

        with GroupTape(model) as tape:
            logps_S = ...                    # (S,), differentiable; entry s depends on sequence s only
            tape.record(logps_S)             # runs no backward yet
        coef_S = ...                         # from rewards and proxies, not from score norms
        group_norm2_P = tape.accumulate(coef_S, group_size=G)

    The calls, the gradient and the norms are those of `ScoreTape`, for less: there is no score of a single sequence.

    Args:
        model: as `ScoreTape` takes it, with the same limits.
        check_rows: whether `record` checks that rows do not mix, as `ScoreTape.record` does.

    Raises:
        UnsupportedModelError: as `ScoreTape` raises.
    """

    def __init__(self, model: nn.Module, *, check_rows: bool = True) -> None:
        super().__init__(model, check_rows)

    def forget(self) -> None:
        """Let go of what was recorded, and of its graph."""
        self._recorded: tuple[Tensor, Layout] | None = None

    def record(self, logps_S: Tensor, *, sequence_ids: Tensor | None = None) -> None:
        """Keep the log-probabilities, whose backward waits for coefficients, and check them.

        Args:
            logps_S: (S,) log-probabilities in the order of the batch's rows; entry s depends on sequence s only.
            sequence_ids: as in `ScoreTape.record`, for packed rows.

        Raises:
            UnsupportedModelError: rows mix.
            ValueError: logps_S is not a differentiable vector, nothing was run inside the `with`, or the parameters are
                sharded.
        """
        self._refuse_unusable(logps_S)
        if any(map(wrapped_by_fsdp, self.model.modules())):
            raise ValueError("no gradient can be had of sharded parameters: take another backward.")
        layout = Layout(len(logps_S), self._recorder.tokens, sequence_ids)
        if self._check_rows:
            check_rows(self._recorder, logps_S, layout)
        self._recorded, self._used = (logps_S, layout), True

    @torch.no_grad()
    def accumulate(self, coef_S: Tensor, group_size: Groups = 1) -> Tensor:
        """Run the backward of sum_s coef_S[s] logps_S[s], and add it to every trainable parameter's `.grad`.

        Args:
            coef_S: (S,) coefficients, taken as constants and rounded to the type of logps_S.
            group_size: G; sequences [p G, (p + 1) G) are group p. Or the size of each group in turn.

        Returns:
            (P,) squared norm of each group's own contribution.

        Raises:
            UnsupportedModelError: as `ScoreTape.record` raises. `.grad` may then hold a part of the sum.
            ValueError: coef_S is not of shape (S,), the groups are not of S sequences, nothing is recorded (any more),
                or logps_S does not depend on the model.
        """
        if self._recorded is None:
            raise ValueError("call record(logps_S) inside the `with` block first; accumulate uses it up.")
        logps_S, layout = self._recorded
        sizes = self._sizes(coef_S, group_size, len(logps_S))
        self.forget()
        norms = self._add_sums(self._recorder.pieces, logps_S, coef_S.detach(), layout, sizes)
        if not norms:
            raise ValueError("nothing to accumulate: logps_S does not depend on any recorded module.")
        return sum_in_widest(norms)
