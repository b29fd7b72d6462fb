"""Rows of a log of any trainer's under our names: a row a step, or a row of the log where it names no steps."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from oblrpo.runs.rows import Metrics
from oblrpo.tables.metrics import ROW_OF

PART = re.compile(
    r"(?:(?:train(?:ing|er)?|actor(?:_train)?|policy|rollout|optim|ppo|(?:ppo|grpo)_actor|grpo_loss|update|system)/)+"
)
MEAN = re.compile(r"[/_](?:mean|avg)$")


NAMES = {
    key: tuple(dict.fromkeys((key, PART.sub("", metric.verl) or key, *metric.others.split())))
    for key, metric in ROW_OF.items()
    if metric.others
}
"""Our name, which is TRL's where TRL has one, and what others call it, as `plain` makes it and without what PART leaves
out; of several that are there the first counts."""
OURS = {other: (name, rank) for name, others in NAMES.items() for rank, other in enumerate(others)}
UNSAID = {"", "step", "learning_rate", "clip_ratio/region_mean"}
"""What alone is no row: settings are called so, too."""

EVALUATION = re.compile(
    r"(val-core/.*/mean@\d+|val/test_score/.*|(eval|val|validation|test|held_?out)[_/].*(accuracy|acc|reward|score|pass@1)"
    r"(/mean(@\d+)?)?)"
)
"""Other names of a held-out accuracy; of several the mean counts."""
EVALUATED = 99  # the rank of a name that EVALUATION has

VITAL = ("reward", "loss", "grad_norm", "kl", "entropy")
"""Metrics of which a NaN or an infinity means that numbers have overflowed: the last two, where the loss has, too."""

NONE = -1.2345678901234567e300
"""Stands in an array for what a row does not have; NaN stands for what is not finite."""


@lru_cache(maxsize=65536)
def plain(name: str) -> str:
    """A name as trainers log it, of a W&B chart ("run - train/reward") or a notebook ("rewards / acc / mean")."""
    name = re.sub(r"\s*/\s*", "/", name.replace("\\_", "_").rpartition(" - ")[2].strip()).removeprefix("train/")
    part = re.fullmatch(r"rewards/(?!mean$|std$|min$|max$|avg$)[^/]+", name)  # of a reward, in older TRL
    return f"{name}/mean" if part else name


@lru_cache(maxsize=65536)
def named(name: str) -> tuple[str, int]:
    """Our name for a metric and how good its own is, 0 the best; an empty text if it is none that is known."""
    low = re.sub(r"[\s.]+", "_", plain(name).lower())
    short = PART.sub("", low) if PART.match(low) else low
    for each in (low, short, MEAN.sub("", short)):
        if each in OURS:
            return OURS[each]
    if EVALUATION.fullmatch(low):
        return "eval/accuracy", EVALUATED
    return (plain(name), 0) if low.startswith("rewards/") else ("", 0)


def is_metric(name: str) -> bool:
    """Whether a name is that of a known metric, and of no setting."""
    return named(name)[0] not in UNSAID


@dataclass(frozen=True)
class _Shape:
    """What is known of entries with the same names in the same order."""

    number: int
    columns: tuple[tuple[str, tuple[int, ...]], ...]  # names, and where their values may stand, the best first
    steps: tuple[int, ...]  # where a step may stand, the best first
    bar: int  # where that of a progress bar stands, or -1
    heldout: tuple[int, ...]
    metrics: frozenset[str]  # our names of known metrics, of a row


class Rows:
    """Rows of a log under our names, in the order of steps: numbers, and None for what is not finite.

    Kept as numbers in arrays, 8 bytes each; a row becomes a dict when it is read. Entries of one step are joined.
    Where a text names no steps, so are entries that have no metric in common, such as those of an evaluation.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._by_number: list[_Shape] = []
        self._shape_E, self._start_E, self._step_E, self._values = array("L"), array("Q"), array("d"), array("d")
        self._order: Sequence[int] = ()
        self._firsts = array("Q")
        self._bar, self._unsteady, self._listed = -math.inf, False, False
        self.counted = True
        """Whether the log names no steps, and rows are counted."""
        self.again = 0
        """How many entries have a step and metrics that were there before: of a second run, or one that was resumed."""
        for entry in entries:
            self.add(entry, listed=True)
        self.close()

    def add(self, entry: Mapping[str, Any], listed: bool = False) -> bool:
        """Take the next entry; False if it holds neither a step nor a metric. One of a list is a row in any case."""
        if not _SCALARS.issuperset(map(type, entry.values())):
            entry = _flat(entry)
        keys = tuple(entry)
        shape = self._shapes.get(keys) or self._shape(keys)
        if not (shape.metrics or shape.steps or listed):
            return False
        numbers = [value if type(value) is float else number(value) for value in entry.values()]
        step = next((n for p in shape.steps if (n := numbers[p]) != NONE and math.isfinite(n)), math.nan)
        if shape.bar >= 0 and step == numbers[shape.bar]:
            self._unsteady |= step <= self._bar  # bars of something else
            self._bar = step
        self._listed = listed
        self._shape_E.append(shape.number)
        self._start_E.append(len(self._values))
        self._values.extend(numbers)
        self._step_E.append(math.trunc(step) if math.isfinite(step) else step)
        return True

    def close(self, printed: bool = False) -> Rows:
        """Put the entries in order once all are there. What is odd among printed ones is no row."""
        order: Sequence[int] = range(len(self._step_E))
        if printed and (odd := self._odd()):
            order = array("Q", (place for place in order if self._shape_E[place] not in odd))
        metrics, rows = [shape.metrics for shape in self._by_number], self._joined(order)
        for way in (order, reversed(order)):  # a step is that of what follows in its row; alone, of what comes before
            row, step = 0, math.nan
            for place in way:
                if not math.isnan(self._step_E[place]):
                    row = rows[place] if way is order or not metrics[self._shape_E[place]] else 0
                    step = self._step_E[place]
                elif rows[place] == row:
                    self._step_E[place] = step
        stepped = array("Q", (place for place in order if not math.isnan(self._step_E[place])))
        self.counted = 2 * len(stepped) <= len(order) or self._unsteady
        if self.counted:
            self._step_E = array("d", rows)
        elif len(stepped) < len(order):
            order = stepped
        if any(self._step_E[after] < self._step_E[before] for before, after in pairwise(order)):
            order = array("Q", sorted(order, key=self._step_E.__getitem__))
        self._order, before = order, -1
        for index, place in enumerate(order):
            if before < 0 or self._step_E[place] != self._step_E[before]:
                self._firsts.append(index)
            else:
                self.again += not metrics[self._shape_E[place]].isdisjoint(metrics[self._shape_E[before]])
            before = place
        return self

    def _joined(self, order: Sequence[int]) -> array[int]:
        """The row of each entry where no steps count: a new one begins with a metric that the last has already."""
        rows, row, metrics = array("Q", bytes(8 * len(self._step_E))), 0, frozenset[str]()
        for place in order:
            of_entry = self._by_number[self._shape_E[place]].metrics
            if not row or not metrics.isdisjoint(of_entry) or (self._listed and math.isnan(self._step_E[0])):
                row, metrics = row + 1, frozenset()
            metrics |= of_entry
            rows[place] = row
        return rows

    def _odd(self) -> set[int]:
        """Shapes without a step and with less than half of the metrics of another: settings, samples, words of a text.

        They come once, or have no metric that the other lacks.
        """
        rich = max((shape.metrics for shape in self._by_number), key=len, default=frozenset[str]())
        times = Counter(self._shape_E)
        few = (each for each in self._by_number if 0 < 2 * len(each.metrics) <= len(rich) and not each.steps)
        odd = (each for each in few if times[each.number] == 1 or each.metrics <= rich)
        return {each.number for each in odd if each.metrics.isdisjoint({"eval/accuracy", "grad_norm"})}

    @property
    def most(self) -> int:
        """How many known metrics an entry has at most."""
        return max((len(shape.metrics) for shape in self._by_number), default=0)

    @property
    def names(self) -> list[str]:
        """The names that were found."""
        return list(dict.fromkeys(name for shape in self._by_number for name, _ in shape.columns))

    @property
    def steps(self) -> array[float]:
        """The steps of the rows."""
        return array("d", (self._step_E[self._order[first]] for first in self._firsts))

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, index: int) -> Metrics:
        place = range(len(self))[index]
        first = self._firsts[place]
        end = self._firsts[place + 1] if place + 1 < len(self) else len(self._order)
        row: Metrics = {"step": int(self._step_E[self._order[first]])}
        for entry in self._order[first:end]:
            row |= {key: value for key, value in self._entry(entry).items() if value is not None or key not in row}
        return row

    def __iter__(self) -> Iterator[Metrics]:
        return map(self.__getitem__, range(len(self)))

    def _shape(self, keys: tuple[str, ...]) -> _Shape:
        names = [plain(key) for key in keys]
        if keys and keys[0].startswith("eval_"):  # TRL's may repeat metrics of the training beside
            names = [name if name.startswith("eval") or named(name)[0] == "step" else "" for name in names]
        found: dict[str, list[tuple[int, int]]] = {}
        for place, name in enumerate(names):
            if name and (our := named(name))[0]:
                found.setdefault(our[0], []).append((our[1], place))
        ranked = {name: tuple(place for _, place in sorted(places)) for name, places in found.items()}
        steps = ranked.pop("step", ())
        heldout = tuple(place for rank, place in found.get("eval/accuracy", ()) if rank == EVALUATED)
        if ranked.get("eval/accuracy") == heldout:  # no one of them is the accuracy
            del ranked["eval/accuracy"]
        columns = dict[str, tuple[int, ...]]()
        for place, name in enumerate(names):
            if name and place not in steps:
                ours = name.removeprefix("actor/")  # ours inside verl
                columns[ours if ours not in names else name] = (place,)
        columns |= {name: places for name, places in ranked.items() if name not in names}
        metrics = frozenset(named(name)[0] for name in names if is_metric(name))
        bar = keys.index("bar") if "bar" in keys else -1
        shape = _Shape(len(self._by_number), tuple(columns.items()), steps, bar, heldout, metrics)
        self._shapes[keys] = shape
        self._by_number.append(shape)
        return shape

    def _entry(self, entry: int) -> Metrics:
        """The numbers of an entry under our names beside their own; `skipped` is 1 where a vital one is not finite."""
        shape, start = self._by_number[self._shape_E[entry]], self._start_E[entry]
        row: Metrics = {}
        for name, places in shape.columns:
            for place in places:
                if (value := self._values[start + place]) != NONE:
                    row[name] = value
                    break
        accuracies = [v for p in shape.heldout if (v := self._values[start + p]) != NONE and math.isfinite(v)]
        if accuracies and "eval/accuracy" not in row:
            row["eval/accuracy"] = math.fsum(accuracies) / len(accuracies)
        generated = "completions/mean_length" in row and math.isfinite(row.get("grad_norm", math.nan))
        unrewarded = math.isnan(row.get("reward", math.nan)) and "reward" in dict(shape.columns)
        if generated and unrewarded:  # no completion has any
            row = {key: value for key, value in row.items() if not key.startswith("reward")}
            row["completions/masked_ratio"] = 1.0
        reward, heldout = row.get("reward", 0.0), row.get("eval/accuracy", math.nan)
        if math.isnan(row.get("learning_rate", 0.0)) or (math.isnan(reward) and not math.isnan(heldout)):
            row = {key: value for key, value in row.items() if value == value}  # NaN is pandas' for what is not there
        low, high = row.get("clip_ratio/low_mean"), row.get("clip_ratio/high_mean")
        if "clip_ratio/region_mean" not in row and low is not None and high is not None:
            row["clip_ratio/region_mean"] = low + high
        if not all(map(math.isfinite, row.values())):
            update = [row[key] for key in ("loss", "grad_norm") if key in row]
            learns = update and all(map(math.isfinite, update))  # a KL of masked completions is NaN, and harms nothing
            odd = [key for key in VITAL[: 3 if learns else None] if not math.isfinite(row.get(key, 0.0))]
            row = {key: value if math.isfinite(value) else None for key, value in row.items()}
            if odd:
                return row | {"skipped": 1.0, "overflow": ", ".join(odd)}
        if "skipped" not in row and not row.keys().isdisjoint(VITAL):
            row["skipped"] = 0.0
        return row


_SCALARS = {float, int, str, bool, type(None)}


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the metrics of the mappings in it; those of verl's file lie in `data`."""
    flat: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            flat |= {str(each) if key in ("data", "metrics") else f"{key}/{each}": of for each, of in value.items()}
        else:
            flat[key] = value
    return flat


WRITTEN = re.compile(r"\s*([-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d*\.?\d+))\s*(%|/\s*\d+)?\s*")
"""Numbers that Python does not read: `1,024.5`, `55%`, `5/1000`."""


def number(value: Any) -> float:
    """A number, of numpy or torch too, or written as text ("5/1000" counts 5); NONE for anything else."""
    if value is None or isinstance(value, bool) or getattr(value, "ndim", False):
        return NONE
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        found = WRITTEN.fullmatch(value) if isinstance(value, str) and len(value) < 99 else None
        return float(found[1].replace(",", "")) / (100 if found[2] == "%" else 1) if found else NONE
