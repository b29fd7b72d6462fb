"""How the per-sequence gradients of one parameter are held between the backward and the update.

| store | holds | norms | any coefficients |
|---|---|---|---|
| Factors | inputs and output gradients, S T (R + C) | Gram products or multiplied out | yes |
| PerSequence | the gradients, S R C | exact | yes, without another product |
| NormsOnly | nothing | exact | in a second backward (`Sums`) |
| Streamed | nothing; inner products and sketches if asked for | exact | none |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from oblrpo.scores import contributions, gram, norms
from oblrpo.scores.contributions import Contribution
from oblrpo.scores.groups import Groups, runs


class _Norms:
    """A store that has taken the norms."""

    _norm2_S: Tensor

    def norm2(self) -> Tensor:
        """Squared norm of each sequence's gradient, (S,)."""
        return self._norm2_S


class Factors:
    """Keeps the factors; norms come by Gram products (multiply=False), multiplied out (True), or the cheaper (None)."""

    def __init__(self, multiply: bool | None = None) -> None:
        self.multiply = multiply
        self.parts: list[Contribution] = []

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        self.parts = parts

    def norm2(self) -> Tensor:
        """Squared norm of each sequence's gradient, (S,)."""
        return norms.norm2(self.parts, self.multiply)

    @property
    def room(self) -> int:
        """How many elements must be made for each sequence before its gradient can be taken."""
        return max(0 if isinstance(part, contributions.Vector) else part.room for part in self.parts)

    def group_sums(self, coef_S: Tensor, groups: Groups, grad: Tensor) -> Tensor:
        """Add sum_s coef_s G_s to `grad`; return each group's squared norm, (P,)."""
        return contributions.group_sums(self.parts, coef_S, groups, grad)

    def sums(self, rows: slice, coef_N: Tensor, size: int) -> Tensor:
        """The sums of coef_s G_s over groups of so many neighbouring rows, (groups, ...)."""
        outers = contributions.matrices(self.parts)
        if outers:
            return contributions.group_gradients(outers, coef_N, rows, size)
        value_NC = contributions.vector_total(self.parts)[rows] * coef_N[rows, None]
        return value_NC.view(-1, size, value_NC.shape[1]).sum(1)

    def gram(self) -> Tensor:
        """Inner products of all pairs of sequences' gradients, (S, S)."""
        return gram.gram_of_parts(self.parts)

    def sketch(self, directions: int, generator: torch.Generator) -> Tensor:
        """Random combinations of each gradient's rows, (S, N), whose inner products are right on average."""
        outers = contributions.matrices(self.parts)
        if not outers:
            return contributions.vector_total(self.parts)
        signs_RK = gram.random_signs((outers[0].rows, directions), generator).to(
            contributions.wide(outers[0].right[:0])
        )
        return contributions.sketch(self.parts, signs_RK / directions**0.5).flatten(1)


class PerSequence(_Norms):
    """Multiplies out once and keeps the product: norms and any weighted sum need no second product."""

    room = 0

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        outers = contributions.matrices(parts)
        if not outers:
            self._gradient_S = contributions.vector_total(parts)
            self._norm2_S = contributions.row_norm2(self._gradient_S)
            return
        first, norm2_S = outers[0], []
        self._gradient_S = contributions.wide(first.right[:0]).new_empty(first.sequences, first.rows, first.columns)
        room = max(part.room for part in outers)  # for factors that are made on the way
        for rows in contributions.chunks(first.sequences, first.rows * first.columns + room):
            out = contributions.multiply_out(outers, rows, self._gradient_S[rows])
            norm2_S.append(contributions.row_norm2(out))
        self._norm2_S = torch.cat(norm2_S)

    def group_sums(self, coef_S: Tensor, groups: Groups, grad: Tensor) -> Tensor:
        """Add sum_s coef_s G_s to `grad`; return each group's squared norm, (P,)."""
        flat_SN = self._gradient_S.flatten(1)
        norms = [_combine(flat_SN[rows], coef_S[rows], size, grad) for rows, size in runs(groups, len(flat_SN))]
        return norms[0] if len(norms) == 1 else torch.cat(norms)

    def sums(self, rows: slice, coef_N: Tensor, size: int) -> Tensor:
        """The sums of coef_s G_s over groups of so many neighbouring rows, (groups, N)."""
        gradient_PGN = self._gradient_S[rows].flatten(1).unflatten(0, (-1, size))
        return torch.bmm(coef_N[rows].to(gradient_PGN.dtype).view(-1, 1, size), gradient_PGN)[:, 0]

    def gram(self) -> Tensor:
        """Inner products of all pairs of sequences' gradients, (S, S)."""
        return gram.gram_of_rows(self._gradient_S)

    def sketch(self, directions: int, generator: torch.Generator) -> Tensor:
        """Random combinations of each gradient's rows, (S, N), whose inner products are right on average."""
        gradient_S = self._gradient_S
        if gradient_S.ndim == 2:
            return gradient_S
        signs_RK = gram.random_signs((gradient_S.shape[1], directions), generator).to(gradient_S)
        combined_SKC: Tensor = (signs_RK / directions**0.5).T @ gradient_S
        return combined_SKC.flatten(1)


class NormsOnly(_Norms):
    """Takes the norms and lets everything go."""

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        self._norm2_S = norms.norm2(parts)


class Sums:
    """Adds up shares that carry their coefficients already, in the second pass of two, and lets them go."""

    def __init__(self, wide_grad: Callable[[], AbstractContextManager[Tensor]], groups: Groups) -> None:
        self._wide_grad, self._groups = wide_grad, groups
        self.norm2_P: Tensor | None = None

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        with self._wide_grad() as grad:
            self.norm2_P = contributions.group_sums(parts, None, self._groups, grad)


class Streamed(_Norms):
    """Takes norms, inner products and sketches in the backward, and lets the gradients go."""

    def __init__(self, wants_gram: bool, sketch: Callable[[Factors], None]) -> None:
        self._wants_gram, self._sketch = wants_gram, sketch
        self._gram_SS: Tensor | None = None

    def take(self, parts: list[Contribution]) -> None:
        """Take in the parameter's shares."""
        factors = Factors()
        factors.take(parts)
        if self._wants_gram:
            self._gram_SS = factors.gram()
        self._norm2_S = factors.norm2() if self._gram_SS is None else self._gram_SS.diagonal().clone()
        self._sketch(factors)

    def gram(self) -> Tensor:
        """Inner products of all pairs of sequences' gradients, (S, S), if they were asked for."""
        if self._gram_SS is None:
            raise ValueError('"streamed" takes inner products only if asked to: record(..., gram=True).')
        return self._gram_SS


Store: TypeAlias = Factors | PerSequence | NormsOnly | Streamed
"""The stores that know the norms."""

Sink: TypeAlias = Store | Sums
"""What takes all shares of one parameter, once they have arrived in the backward."""


def _combine(gradient_SN: Tensor, coef_S: Tensor, group_size: int, grad: Tensor) -> Tensor:
    """Add weighted sums of rows to `grad`; return each group's squared norm; a cache's worth of columns at once."""
    groups = coef_S.shape[0] // group_size
    coef_P1G = coef_S.to(gradient_SN.dtype).view(groups, 1, group_size)
    rows_PGN = gradient_SN.view(groups, group_size, -1)
    norm2_P = gradient_SN.new_zeros(groups)
    flat = grad.view(-1)
    width = max(1, (1 << 20) // groups)
    for start in range(0, flat.numel(), width):
        group_PN = torch.bmm(coef_P1G, rows_PGN[:, :, start : start + width])[:, 0]
        flat[start : start + width] += group_PN.sum(0) if groups > 1 else group_PN[0]
        norm2_P += contributions.row_norm2(group_PN)
    return norm2_P
