"""The weighted gradient, and each group's norm, where a batch's rows were recorded in several forwards.

Rows of like length go through the model together, so that little is padded; a group's outputs may be in any of these
slices. The group's gradient is then the sum of its shares of every slice, multiplied out parameter by parameter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from oblrpo.scores import contributions
from oblrpo.scores.stores import Factors, PerSequence, Store
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
    for chunk in contributions.chunks(groups, together):
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
