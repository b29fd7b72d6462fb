"""The score tape: exact squared score norms and the weighted gradient from one forward and one backward.

The backward is for activations only. It passes, for every call of a layer, the inputs A_s and the output gradients B_s
of each sequence; the layer's share of the score is B_s' A_s, whose norm needs no such product (`contributions`), and
sum_s a_s B_s' A_s, for coefficients a_s that may depend on those norms, is the parameter gradient (book-keeping,
Bu et al. 2022, arXiv 2210.00038). So the coefficients are chosen *after* the backward, and no second one is needed.

Rows of like length may go through the model together, so that little is padded; a group's outputs may be in any of
these slices. The group's gradient is then the sum of its shares of every slice, multiplied out parameter by parameter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from oblrpo.scores import contributions
from oblrpo.scores.contributions import sum_in_widest
from oblrpo.scores.gram import Sketch, Sketcher
from oblrpo.scores.group_tape import Groups, RecordingTape, check_rows
from oblrpo.scores.layout import Layout
from oblrpo.scores.rules import wrapped_by_fsdp
from oblrpo.scores.stores import METHODS, Factors, NormsOnly, PerSequence, Store, choose_stores, norm2_of
from oblrpo.scores.trainable_layers import ParameterPiece

ALONE = 1 << 18
"""From so many elements on a parameter's groups are summed one by one: a call costs less than a pass over its sums."""


@dataclass(frozen=True)
class Slice:
    """Some of a batch's rows, recorded in a forward of their own.

    Args:
        stores: what holds each parameter's gradients.
        rows_S: which rows of the batch they are.
    """

    stores: dict[ParameterPiece, Store]
    rows_S: Tensor


def order_of(slices: Sequence[Slice]) -> Tensor:
    """Where each of the batch's rows is among those of the slices, one after the other, (S,)."""
    rows_S = torch.cat([each.rows_S for each in slices])
    if not torch.equal(rows_S.sort().values, torch.arange(len(rows_S), device=rows_S.device)):
        raise ValueError("the rows that were recorded are not each row of a batch once.")
    return rows_S.argsort()


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of a slice in which each of some groups has as many rows."""

    start: int
    size: int
    groups: list[int]
    """The groups, ascending; there may be others between them."""

    def of(self, groups: slice) -> tuple[slice, list[int]]:
        """The rows of those of the groups that are in a range, and which these are, counted from its start."""
        first, last = (bisect_left(self.groups, end) for end in (groups.start, groups.stop))
        rows = slice(self.start + first * self.size, self.start + last * self.size)
        return rows, [group - groups.start for group in self.groups[first:last]]


@dataclass(frozen=True)
class GroupsOfSlice:
    """The groups of a slice's rows, of which it need not have all: of each row, and in runs."""

    owner_N: Tensor
    runs: list[Run]


def in_slices(slices: Sequence[Slice], sizes: Sequence[int]) -> list[GroupsOfSlice]:
    """Where the groups of a batch, of these sizes, are in its slices."""
    owner_S = torch.arange(len(sizes), device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
    order_of(slices)  # refuses what is no batch
    places = []
    for each in slices:
        owner_N, of_slice, start = owner_S[each.rows_S.cpu()], list[Run](), 0
        for group, same in groupby(owner_N.tolist()):
            size = len(list(same))
            if of_slice and of_slice[-1].size == size and of_slice[-1].groups[-1] < group:
                of_slice[-1].groups.append(group)
            else:
                of_slice.append(Run(start, size, [group]))
            start += size
        places.append(GroupsOfSlice(owner_N.to(each.rows_S.device), of_slice))
    return places


def group_sums(
    piece: ParameterPiece, slices: Sequence[Slice], places: Sequence[GroupsOfSlice], coef_S: Tensor, grad: Tensor
) -> Tensor:
    """Add sum_s coef_s G_s of one parameter to `grad`; return the squared norm of each group's sum, (P,).

    As many groups of a small parameter as there is room for are multiplied out at a time, in as few products as there
    are runs.
    """
    groups = 1 + max(run.groups[-1] for place in places for run in place.runs)
    present = [  # an expert may have no token of a slice
        (store, place, coef_S[each.rows_S])
        for each, place in zip(slices, places, strict=True)
        if isinstance(store := each.stores.get(piece), Factors | PerSequence)
    ]
    if all(store.lookups for store, _, _ in present):
        lookups = [(part, coef_N, place.owner_N) for store, place, coef_N in present for part in store.lookups]
        return contributions.lookup_sums(lookups, groups, grad)
    room = max(run.size * store.room for store, place, _ in present for run in place.runs)
    norm2_P = grad.new_zeros(groups)
    together = max(grad.numel() + room, 1 if grad.numel() < ALONE else contributions.CHUNK_ELEMENTS)
    for chunk in contributions.chunks(groups, together, grad):
        total: Tensor | None = None
        for store, place, coef_N in present:
            for run in place.runs:
                rows, inside = run.of(chunk)
                if not inside:
                    continue
                share = store.sums(rows, coef_N, run.size).view(-1, *grad.shape)
                if len(inside) == chunk.stop - chunk.start:
                    total = share if total is None else total.add_(share)
                    continue
                total = share.new_zeros(chunk.stop - chunk.start, *grad.shape) if total is None else total
                total.index_add_(0, torch.tensor(inside, device=grad.device), share)
        if total is not None:
            grad += total.sum(0) if len(total) > 1 else total[0]
            norm2_P[chunk] = contributions.row_norm2(total)
    return norm2_P


class ScoreTape(RecordingTape):
    """Squared score norms w_s = || grad_theta log pi(o_s|q_s) ||^2 and sum_s a_s grad_theta log pi(o_s|q_s).

    Use::

        with ScoreTape(model) as tape:
            logps_S = ...                    # (S,), differentiable; entry s depends on sequence s only
            tape.record(logps_S)             # one backward for activations; no .grad changes
        norm2_S = tape.norm2()
        group_norm2_P = tape.accumulate(coef_S, group_size=G)

    The norms cover exactly the parameters with `requires_grad`. Leaving the `with` restores the model; a tape may be
    entered again, which forgets what was recorded.

    Args:
        model: any module whose trainable parameters belong to layers with a rule (`scores.rules`, `scores.experts`).
        method: how gradients are held between the backward and `accumulate`; all are exact.
            "auto": per layer, the cheaper of inputs and output gradients with Gram norms, T^2 (R + C), and the
            gradients multiplied out and kept, T R C; the same rule says which of them is smaller.
            "gram", "instantiate": inputs and output gradients, norms by Gram products or by multiplying out.
            "two_pass": norms in one backward, the gradient in a second; holds nothing beyond autograd's own graph.
            Coefficients are rounded to the type of logps_S.
            "streamed": norms, and what `record` is to take, in the one backward; holds nothing and gives no gradient,
            for loops that take theirs elsewhere. Parameters may be sharded by FSDP2 (`fully_shard`).
        check_rows: whether `record` checks that rows do not mix.

    Limits: sequences must not mix (no BatchNorm, no attention across packed sequences), and dropout must be off. Every
    activation must lead with batch rows, or with batch rows times tokens. `record` says what of this is checked.

    Activations and gradients of shorter types than float32 are summed in float32.

    Raises:
        ValueError: no such method.
        UnsupportedModelError: a trainable parameter belongs to a layer type without a rule (the module is named); a
            parameter was used other than by calling its module; an activation was changed in place; checkpointing is
            reentrant or another library's; the model is compiled.
    """

    def __init__(self, model: nn.Module, method: str = "auto", *, check_rows: bool = True) -> None:
        if method not in METHODS:
            raise ValueError(f"no method {method!r}; there are {', '.join(METHODS)}.")
        self.method = method
        super().__init__(model, check_rows)

    def forget(self) -> None:
        """Let go of what was recorded, and of its memory."""
        self._stores, self._sequences = dict[ParameterPiece, Store](), 0
        self._slices: list[Slice] = []
        self._norm2_S: Tensor | None = None
        self._graph: tuple[Tensor, Layout] | None = None
        self._sketchers: dict[Sketch, Sketcher] = {}

    def __enter__(self) -> ScoreTape:
        super().__enter__()
        self._places = {id(parameter): place for place, parameter in enumerate(self.model.parameters())}
        return self

    @property
    def takes_slices(self) -> bool:
        """Whether a batch's rows may be recorded in several forwards: with methods that keep what gradients need."""
        return self.method not in {"two_pass", "streamed"}

    def record(
        self,
        logps_S: Tensor,
        *,
        sequence_ids: Tensor | None = None,
        gram: int = 0,
        sketches: Sequence[Sketch] = (),
        rows_S: Tensor | None = None,
    ) -> None:
        """Run the backward for activations of sum_s logps_S[s]; no parameter's `.grad` changes.

        A model's first record of several sequences, by whichever tape, takes one more backward, of about half of the
        entries, and refuses it if other rows matter to them: entries in another order than the rows, a layer that runs
        time-first, attention across packed sequences. It is checked again when the model's modules, their modes, what
        is trained, its arguments or functions that make logps_S are others (`check_rows`), and in every record where a
        function that is not known to keep rows apart runs around parameters without a rule. The check is left out, or
        there refused, for sharded parameters, and where functions or saved-tensor hooks of other libraries are in the
        graph.

        Args:
            logps_S: (S,) log-probabilities in the order of the batch's rows; entry s depends on sequence s only.
            sequence_ids: (B, L), for packed rows: which sequence each input token belongs to, negative for none.
            gram: for "streamed" only, if `gram` will be called: of how many neighbouring rows each inner products are
                taken; S: of all pairs.
            sketches: for "streamed" only: the arguments with which `sketch` will be called.
            rows_S: which of a larger batch's rows these are, in any order; where groups with as many rows here are
                neighbours, one product sums all of them. Its other rows are then recorded in the same `with`, each
                once, by further forwards. `norm2` and `accumulate` are of the whole batch; `gram` and `sketch` cannot
                be had.

        Raises:
            UnsupportedModelError: as the class says, or rows mix.
            ValueError: logps_S is not a differentiable vector, nothing was run inside the `with`, or an argument is
                out of place.
        """
        self._refuse_unusable(logps_S)
        if (gram or sketches) and self.method != "streamed":
            raise ValueError('record takes gram and sketches for method="streamed" only; others can do so later.')
        if self._slices and rows_S is None:
            raise ValueError("record all rows of a batch in one forward, or give rows_S each time.")
        if rows_S is not None and not self.takes_slices:
            raise ValueError(f'"{self.method}" records all rows of a batch in one forward; use "auto".')
        S = logps_S.shape[0]
        if gram and (gram < 0 or S % gram):
            raise ValueError(f"{S} rows are no whole groups of {gram}.")
        layout = Layout(S, self._recorder.tokens, sequence_ids)
        try:
            if self.method == "streamed":
                stores = self._streamed(S, gram, sketches)
            else:
                stores = choose_stores(self.method, self._recorder.pieces, S)
            if self._check_rows:
                check_rows(self._recorder, logps_S, layout)
            delivered = self._recorder.backward(logps_S, None, layout, stores, keep_graph=self.method == "two_pass")
        except BaseException:
            self.forget()  # a refused record leaves nothing to read
            raise
        if not delivered:
            self.forget()
            raise ValueError("nothing to record: logps_S does not depend on any recorded module.")
        stores = {piece: stores[piece] for piece in delivered}
        if rows_S is not None:
            self._slices.append(Slice(stores, rows_S))
            self._sequences += S
            self._recorder.next_forward()
            return
        self._stores, self._sequences = stores, S
        self._used = True
        if self.method == "two_pass":
            self._graph = (logps_S, layout)

    def _streamed(self, sequences: int, gram: int, sketches: Sequence[Sketch]) -> dict[ParameterPiece, Store]:
        device = next(self.model.parameters()).device
        self._sketchers = {spec: Sketcher(spec, sequences, device) for spec in sketches}

        def sketch(piece: ParameterPiece, gradients: Factors) -> None:
            for sketcher in self._sketchers.values():
                sketcher.add(self._places[id(piece.parameter)], piece.index, gradients.sketch)

        return {piece: NormsOnly(gram, partial(sketch, piece)) for piece in self._recorder.pieces}

    @torch.no_grad()
    def norm2(self) -> Tensor:
        """Squared score norms || grad_theta logps_S[s] ||^2 over all trainable parameters, shape (S,)."""
        self._need_record()
        if self._norm2_S is None:
            with self._no_autocast():
                norm2_S = torch.cat([*map(norm2_of, self._forwards())])
            self._norm2_S = norm2_S[order_of(self._slices)] if self._slices else norm2_S
        return self._norm2_S

    def _forwards(self) -> list[dict[ParameterPiece, Store]]:
        return [each.stores for each in self._slices] or [self._stores]

    @torch.no_grad()
    def accumulate(self, coef_S: Tensor, group_size: Groups = 1) -> Tensor:
        """Add sum_s coef_S[s] grad_theta logps_S[s] to every trainable parameter's `.grad`.

        Args:
            coef_S: (S,) coefficients, taken as constants.
            group_size: G; sequences [p G, (p + 1) G) are group p. Or the size of each group in turn.

        Returns:
            (P,) squared norm of each group's own contribution, || sum of coef_s grad logps_s over s in p ||^2.

        Raises:
            ValueError: coef_S is not of shape (S,), the groups are not of S sequences, the graph was used up
                ("two_pass"), nothing is held ("streamed"), or the parameters are sharded.
        """
        self._need_record()
        if self.method == "streamed" or any(map(wrapped_by_fsdp, self.model.modules())):
            raise ValueError(
                'no gradient can be had from "streamed", nor of sharded parameters: take another backward.'
            )
        sizes, coef_S = self._sizes(coef_S, group_size, self._sequences), coef_S.detach()
        if self.method == "two_pass":
            if self._graph is None:
                raise ValueError('"two_pass" frees its graph in accumulate; record again.')
            (logps_S, layout), self._graph = self._graph, None
            return sum_in_widest(self._add_sums(self._stores, logps_S, coef_S, layout, sizes))
        norms, places = [], in_slices(self._slices, sizes) if self._slices else []
        for piece in dict.fromkeys(piece for stores in self._forwards() for piece in stores):
            with self._no_autocast():
                coef = coef_S.to(torch.promote_types(piece.parameter.dtype, torch.float32))
                if self._slices:
                    total = torch.zeros(piece.shape, dtype=coef.dtype, device=coef.device)
                    norms.append(group_sums(piece, self._slices, places, coef, total))
                else:
                    store = self._stores[piece]
                    assert isinstance(store, Factors | PerSequence)  # the others are above
                    norm2_P, total = store.group_sums(coef, sizes)
                    norms.append(norm2_P)
                piece.add(total)
        return sum_in_widest(norms)

    @torch.no_grad()
    def gram(self) -> Tensor:
        """Inner products of scores, <grad_theta logps_S[a], grad_theta logps_S[b]>: of all pairs, (S, S).

        They take about S / (3 T) plain steps. A "streamed" tape has those within the S / G groups of its record,
        (S / G, G, G).

        Raises:
            ValueError: the method keeps no gradients ("two_pass"), or was not requested in time ("streamed").
        """
        if self.method == "streamed":
            self._need_record()
            grams = [store.gram_PGG for store in self._stores.values() if isinstance(store, NormsOnly)]
            if not all(isinstance(gram_PGG, Tensor) for gram_PGG in grams):
                raise ValueError('"streamed" takes inner products only if requested: record(..., gram=G).')
            return sum_in_widest([gram_PGG for gram_PGG in grams if gram_PGG is not None])
        with self._no_autocast():
            return sum_in_widest([store.gram() for store in self._holding_gradients().values()])

    @torch.no_grad()
    def sketch(self, seed: int, directions: int = 16, dimensions: int = 4096) -> Tensor:
        """Sketches z of the scores, (S, L), with <z_a, z_b> = <grad logps_S[a], grad logps_S[b]> on average.

        Of each matrix K random combinations of rows are taken, and all is hashed into L buckets (`gram.Sketcher`).
        The same seed gives the same projection, whatever the micro-batch: sketches may be concatenated.

        Args:
            seed: of the projection.
            directions: K; the error of an inner product falls as 1 / sqrt(K), the time grows as K S T (R + C).
            dimensions: L; it falls as 1 / sqrt(L), memory grows as S L.

        Raises:
            ValueError: the method keeps no gradients ("two_pass"), or was not requested in time ("streamed").
        """
        spec = Sketch(seed, directions, dimensions)
        if self.method == "streamed":
            if spec not in self._sketchers:
                raise ValueError(f'"streamed" takes sketches only if requested: record(..., sketches=[{spec}]).')
            return self._sketchers[spec].sketch_SL
        stores = self._holding_gradients()
        sketcher = Sketcher(spec, self._sequences, next(self.model.parameters()).device)
        with self._no_autocast():
            for piece, store in stores.items():
                sketcher.add(self._places[id(piece.parameter)], piece.index, store.sketch)
        return sketcher.sketch_SL

    def _holding_gradients(self) -> dict[ParameterPiece, Factors | PerSequence]:
        self._need_record()
        if self._slices:
            raise ValueError("the rows were recorded in several forwards; record all of them in one for this.")
        stores = {piece: store for piece, store in self._stores.items() if isinstance(store, Factors | PerSequence)}
        if len(stores) < len(self._stores):
            raise ValueError(f'"{self.method}" keeps no gradients to take inner products of; use "auto".')
        return stores

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(next(self.model.parameters()).device.type, enabled=False)

    def _need_record(self) -> None:
        if not self._sequences:
            raise ValueError("call record(logps_S) inside the `with` block first.")
