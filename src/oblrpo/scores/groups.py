"""Groups of neighbouring sequences, of one size or of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

Groups: TypeAlias = int | Sequence[int]
"""How many sequences are in each group: as many in all, or of each its own number. Groups follow each other in rows."""


def runs(groups: Groups, sequences: int) -> list[tuple[slice, int]]:
    """The rows of neighbouring groups of one size, with the size."""
    if isinstance(groups, int):
        return [(slice(0, sequences), groups)]
    result, start = [], 0
    for size, same in groupby(groups):
        stop = start + size * len(list(same))
        result.append((slice(start, stop), size))
        start = stop
    return result


def fit(groups: Groups, sequences: int) -> bool:
    """Whether so many sequences make whole groups, of at least one each."""
    if isinstance(groups, int):
        return groups > 0 and sequences % groups == 0
    return min(groups, default=0) > 0 and sum(groups) == sequences
