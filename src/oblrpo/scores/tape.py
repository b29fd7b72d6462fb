"""The score tape: exact squared score norms and the weighted gradient from one forward and one backward.

The backward is for activations only. It passes, for every call of a layer, the inputs A_s and the output gradients B_s
of each sequence; the layer's share of the score is B_s' A_s, whose norm needs no such product (`contributions`), and
sum_s a_s B_s' A_s, for coefficients a_s that may depend on those norms, is the parameter gradient (book-keeping,
Bu et al. 2022, arXiv 2210.00038). So the coefficients are chosen *after* the backward, and no second one is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from oblrpo.scores import norms
from oblrpo.scores.contributions import Contribution, sum_in_widest
from oblrpo.scores.gram import Sketch, Sketcher, gram_of_parts
from oblrpo.scores.layout import Layout
from oblrpo.scores.recorder import ForwardRecorder, why_nothing_was_recorded
from oblrpo.scores.rows import check_rows
from oblrpo.scores.rules import wrapped_by_fsdp
from oblrpo.scores.stores import METHODS, Store, held, norm2_of
from oblrpo.scores.trainable_layers import ParameterPiece


class ScoreTape:
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
            "streamed": norms within the one backward; holds nothing and gives no gradient, for loops that take theirs
            elsewhere. Parameters may be sharded by FSDP2 (`fully_shard`).
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
        self.model, self.method = model, method
        self._check_rows, self._used = check_rows, False
        self._recorder = ForwardRecorder(model)
        self.forget()

    def forget(self) -> None:
        """Let go of what was recorded, and of its memory."""
        self._stores, self._sequences = dict[ParameterPiece, Store](), 0
        self._known: list[Tensor] = []  # of "streamed", each parameter's norms
        self._norm2_S: Tensor | None = None
        self._group_size, self._grams = 0, list[Tensor]()
        self._sketchers: dict[Sketch, Sketcher] = {}

    def __enter__(self) -> ScoreTape:
        self._recorder.start()
        self.forget()
        self._used = False
        self._places = {id(parameter): place for place, parameter in enumerate(self.model.parameters())}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.stop()

    def record(
        self,
        logps_S: Tensor,
        *,
        sequence_ids: Tensor | None = None,
        gram: int = 0,
        sketches: Sequence[Sketch] = (),
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
            gram: if `gram` will be called: of how many neighbouring rows each inner products are taken; S: of all
                pairs, which takes about S / (3 T) plain steps.
            sketches: the arguments with which `sketch` will be called.

        Raises:
            UnsupportedModelError: as the class says, or rows mix.
            ValueError: logps_S is not a differentiable vector, nothing was run inside the `with`, or an argument is
                out of place.
        """
        self._refuse_unusable(logps_S)
        S = logps_S.shape[0]
        if gram and (gram < 0 or S % gram):
            raise ValueError(f"{S} rows are no whole groups of {gram}.")
        layout, device = Layout(S, self._recorder.tokens, sequence_ids), next(self.model.parameters()).device
        self._sequences, self._group_size = S, gram
        self._sketchers = {spec: Sketcher(spec, S, device) for spec in sketches}
        try:
            if self._check_rows:
                check_rows(self._recorder, logps_S, layout)
            self._recorder.backward(logps_S, layout, self._take)
            if not (self._stores or self._known):
                raise ValueError("nothing to record: logps_S does not depend on any recorded module.")
        except BaseException:
            self.forget()  # a refused record leaves nothing to read
            raise
        self._used = True

    def _take(self, piece: ParameterPiece, parts: list[Contribution]) -> None:
        """Take in all shares of one parameter, once they have arrived in the backward."""
        if self._group_size:
            self._grams.append(gram_of_parts(parts, self._group_size))
        for sketcher in self._sketchers.values():
            sketcher.add(self._places[id(piece.parameter)], piece.index, parts)
        if self.method != "streamed":
            self._stores[piece] = held(self.method, parts)
        elif self._group_size:
            self._known.append(self._grams[-1].diagonal(dim1=1, dim2=2).flatten())
        else:
            self._known.append(norms.norm2(parts))

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

    @torch.no_grad()
    def norm2(self) -> Tensor:
        """Squared score norms || grad_theta logps_S[s] ||^2 over all trainable parameters, shape (S,)."""
        self._need_record()
        if self._norm2_S is None:
            with self._no_autocast():
                self._norm2_S = norm2_of(self._known, self._stores.values())
        return self._norm2_S

    @torch.no_grad()
    def accumulate(self, coef_S: Tensor, group_size: int = 1) -> Tensor:
        """Add sum_s coef_S[s] grad_theta logps_S[s] to every trainable parameter's `.grad`.

        Args:
            coef_S: (S,) coefficients, taken as constants.
            group_size: G; sequences [p G, (p + 1) G) are group p.

        Returns:
            (P,) squared norm of each group's own contribution, || sum of coef_s grad logps_s over s in p ||^2.

        Raises:
            ValueError: coef_S is not of shape (S,), G does not divide S, nothing is held ("streamed"), or the
                parameters are sharded.
        """
        self._need_record()
        if self.method == "streamed" or any(map(wrapped_by_fsdp, self.model.modules())):
            raise ValueError(
                'no gradient can be had from "streamed", nor of sharded parameters: take another backward.'
            )
        S, coef_S = self._sequences, coef_S.detach()
        if coef_S.shape != (S,) or group_size < 1 or S % group_size:
            raise ValueError(f"coef_S {tuple(coef_S.shape)} and group_size {group_size} do not fit {S} sequences.")
        group_norm2 = []
        for piece, store in self._stores.items():
            with self._no_autocast():
                wide = torch.promote_types(piece.parameter.dtype, torch.float32)
                norm2_P, total = store.group_sums(coef_S.to(wide), group_size)
            group_norm2.append(norm2_P)
            piece.add(total)
        return sum_in_widest(group_norm2)

    def gram(self) -> Tensor:
        """Inner products of scores, <grad_theta logps_S[a], grad_theta logps_S[b]>, within groups, (S / G, G, G).

        Raises:
            ValueError: they were not requested: record(..., gram=G).
        """
        self._need_record()
        if not self._grams:
            raise ValueError("inner products are taken only if requested: record(..., gram=G).")
        return sum_in_widest(self._grams)

    def sketch(self, seed: int, directions: int = 16, dimensions: int = 4096) -> Tensor:
        """Sketches z of the scores, (S, L), with <z_a, z_b> = <grad logps_S[a], grad logps_S[b]> on average.

        Of each matrix K random combinations of rows are taken, and all is hashed into L buckets (`gram.Sketcher`).
        The same seed gives the same projection, whatever the micro-batch: sketches may be concatenated.

        Args:
            seed: of the projection.
            directions: K; the error of an inner product falls as 1 / sqrt(K), the time grows as K S T (R + C).
            dimensions: L; it falls as 1 / sqrt(L), memory grows as S L.

        Raises:
            ValueError: it was not requested: record(..., sketches=[Sketch(...)]).
        """
        self._need_record()
        spec = Sketch(seed, directions, dimensions)
        if spec not in self._sketchers:
            raise ValueError(f"sketches are taken only if requested: record(..., sketches=[{spec}]).")
        return self._sketchers[spec].sketch_SL

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(next(self.model.parameters()).device.type, enabled=False)

    def _need_record(self) -> None:
        if not self._sequences:
            raise ValueError("call record(logps_S) inside the `with` block first.")
