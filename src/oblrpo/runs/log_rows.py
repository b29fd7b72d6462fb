"""Rows of a log of any trainer's under our names: a row a step, or a row of the log where it names no steps."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from oblrpo.runs.rows import Metrics

NAMES: dict[str, tuple[str, ...]] = {
    # our name, which is TRL's where TRL has one, and what others call it; of several that are there the first counts.
    # Written as `plain` makes them, and without what PART and MEAN leave out.
    "step": ("step", "global_step", "_step", "global_step/max_steps", "iteration", "iter", "rollout", "perf", "bar"),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "objective/scores", "mean_reward", "raw_reward",
               "avg_reward", "average_reward", "reward/avg_raw_reward", "loss/avg_raw_rewards", "task_reward",
               "final_reward", "total_rewards", "train_reward", "reward/overall", "env/all/reward/total", "rm",
               "rewards"),
    "reward_std": ("reward_std", "reward/std"),
    "reward_min": ("reward_min", "critic/score/min", "critic/rewards/min", "reward/min"),
    "reward_max": ("reward_max", "critic/score/max", "critic/rewards/max", "reward/max"),
    "frac_reward_zero_std": ("frac_reward_zero_std", "zero_std_ratio", "frac_zero_std"),
    "entropy": ("entropy", "entropy_loss", "policy_entropy", "approx_entropy", "objective/entropy"),
    "kl": ("kl", "kl_loss", "policy_kl", "kl_penalty", "kl_div", "kl_divergence", "mean_kl", "critic/kl",
           "reward_kl_penalty", "objective/kl"),
    "completions/mean_length": ("completions/mean_length", "response_length", "completion_length", "mean_length",
                                "mean_completion_length", "response_lengths", "response_len", "generate/avg_num_tokens",
                                "mean_generation_length", "mean_gen_tokens_per_sample", "seq_len", "seq_length",
                                "val/sequence_lengths", "token/response_length", "mean_response_length",
                                "avg_response_length", "completion_len", "gen_len", "glen"),
    "completions/clipped_ratio": ("completions/clipped_ratio", "response_length/clip_ratio", "clipped_ratio",
                                  "clipped_completions_ratio", "response_clip_ratio", "truncated_ratio",
                                  "is_truncated", "no_eos_ratios"),
    "grad_norm": ("grad_norm", "gradient_norm", "raw_grad_norm", "total_grad_norm"),
    "learning_rate": ("learning_rate", "lr_used", "lr", "actor_lr", "act_lr", "policy_lr", "lr-pg_0"),
    "baseline/spread": ("baseline/spread", "critic/baseline/spread"),
    "loss": ("loss", "pg_loss", "training_loss", "policy_loss", "act_loss", "actor_loss", "loss/policy", "pg"),
    "clip_ratio/region_mean": ("clip_ratio/region_mean", "pg_clipfrac", "clip_ratio", "clipfrac", "clip_fraction",
                               "ppo_clip_ratio", "ppo_ratio_clipfrac"),
    "sampling/sampling_logp_difference/mean": ("sampling/sampling_logp_difference/mean", "mismatch_kl",
                                               "rollout_corr/log_ppl_abs_diff", "train_rollout_logprob_abs_diff",
                                               "gen_kl_error", "generation_kl_error"),
    "eval/accuracy": ("eval/accuracy", "eval_reward", "eval/reward", "eval_accuracy"),
}  # fmt: skip
OURS = {other: (name, rank) for name, others in NAMES.items() for rank, other in enumerate(others)}
PART = re.compile(r"(?:(?:train(?:ing|er)?|actor(?:_train)?|policy|rollout|optim|(?:ppo|grpo)_actor|update|system)/)+")
MEAN = re.compile(r"[/_](?:mean|avg)$")
UNSAID = {"step", "learning_rate", "clip_ratio/region_mean"}
"""Metrics that alone are no row: settings are called so, too."""

HELD_OUT = re.compile(
    r"(val-core/.*/mean@\d+|val/test_score/.*|(eval|val|validation|test|held_?out)[_/].*(accuracy|acc|reward|score|pass@1)"
    r"(/mean(@\d+)?)?)"
)
"""Other names of a held-out accuracy; of several the mean counts."""
HELD = 99
"""The rank of a name that HELD_OUT has."""

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
    if HELD_OUT.fullmatch(low):
        return "eval/accuracy", HELD
    return (plain(name), 0) if low.startswith("rewards/") else ("", 0)


@dataclass(frozen=True)
class _Shape:
    """What is known of entries with the same names in the same order."""

    number: int
    names: tuple[str, ...]  # plain; empty for what is left out
    steps: tuple[int, ...]  # where a step may stand, the best first
    bar: int  # where that of a progress bar stands, or -1
    ours: tuple[tuple[str, tuple[int, ...]], ...]  # our names, and where their values may stand, the best first
    heldout: tuple[int, ...]
    told: frozenset[str]  # metrics of a row, by our names


class Rows:
    """Rows of a log under our names, in the order of steps: numbers, and None for what is not finite.

    Kept as numbers in arrays, 8 bytes each; a row becomes a dict when it is asked for. Entries of one step are joined.
    Where a text names no steps, so are entries that have no metric in common, such as those of an evaluation.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._by_number: list[_Shape] = []
        self._shape_E, self._start_E, self._values = array("L"), array("Q"), array("d")
        self._step_E, self._row_E = array("d"), array("Q")
        self._told, self._unsteady, self._rows = set[str](), False, 0
        self._order: Sequence[int] = ()
        self._firsts = array("Q")
        self.counted = True
        """Whether the log names no steps, and rows are counted."""
        for entry in entries:
            self.add(entry, listed=True)
        self.close()

    def add(self, entry: Mapping[str, Any], listed: bool = False) -> bool:
        """Take the next entry; False if it holds neither a step nor a metric. One of a list is a row in any case."""
        if not _SCALARS.issuperset(map(type, entry.values())):
            entry = _flat(entry)
        keys = tuple(entry)
        shape = self._shapes.get(keys) or self._shape(keys)
        if not (shape.told or shape.steps or listed):
            return False
        numbers = [value if type(value) is float else number(value) for value in entry.values()]
        step = next((n for p in shape.steps if (n := numbers[p]) != NONE and math.isfinite(n)), math.nan)
        if shape.bar >= 0 and step == numbers[shape.bar] and self._step_E and not step > self._step_E[-1]:
            self._unsteady = True  # bars of something else
        if listed or not self._rows or not self._told.isdisjoint(shape.told):
            self._rows += 1
            self._told = set()
        self._told |= shape.told
        self._shape_E.append(shape.number)
        self._start_E.append(len(self._values))
        self._values.extend(numbers)
        self._step_E.append(math.trunc(step) if math.isfinite(step) else step)
        self._row_E.append(self._rows)
        return True

    def close(self) -> Rows:
        """Put the entries in order once all are there."""
        known = sum(not math.isnan(step) for step in self._step_E)
        self.counted = 2 * known <= len(self._step_E) or self._unsteady
        step_E: Sequence[float] = self._row_E
        if not self.counted:
            step_E, newest = array("d"), next(step for step in self._step_E if not math.isnan(step))
            for step in self._step_E:
                newest = newest if math.isnan(step) else step
                step_E.append(newest)
        self._order = range(len(step_E))
        if any(after < before for before, after in pairwise(step_E)):
            self._order = array("Q", sorted(self._order, key=step_E.__getitem__))
        self._step_E = array("d", step_E)
        places = range(len(step_E))
        self._firsts = array("Q", (p for p in places if not p or self._at(p) != self._at(p - 1)))
        return self

    @property
    def names(self) -> list[str]:
        """The names that were found."""
        return list(dict.fromkeys(name for shape in self._by_number for name in shape.names if name))

    @property
    def steps(self) -> array[float]:
        """The steps of the rows."""
        return array("d", map(self._at, self._firsts))

    def _at(self, place: int) -> float:
        return self._step_E[self._order[place]]

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, index: int) -> Metrics:
        place = range(len(self))[index]
        first = self._firsts[place]
        end = self._firsts[place + 1] if place + 1 < len(self) else len(self._order)
        row: Metrics = {"step": int(self._at(first))}
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
        heldout = tuple(place for rank, place in found.get("eval/accuracy", ()) if rank == HELD)
        ours = {name: places for name, places in ranked.items() if name not in ("step", *names) and places != heldout}
        bar = keys.index("bar") if "bar" in keys else -1
        steps = ranked.get("step", ())
        # ours inside verl
        names = [name.removeprefix("actor/") if name.removeprefix("actor/") not in names else name for name in names]
        told = frozenset(found) - UNSAID
        names = ["" if place in steps else name for place, name in enumerate(names)]
        shape = _Shape(len(self._by_number), tuple(names), steps, bar, tuple(ours.items()), heldout, told)
        self._shapes[keys] = shape
        self._by_number.append(shape)
        return shape

    def _entry(self, entry: int) -> Metrics:
        """The numbers of an entry under our names beside their own; `skipped` is 1 where a vital one is not finite."""
        shape, start = self._by_number[self._shape_E[entry]], self._start_E[entry]
        values = self._values[start : start + len(shape.names)]
        row: Metrics = {name: value for name, value in zip(shape.names, values, strict=True) if value != NONE and name}
        for name, places in shape.ours:
            if (value := next((values[place] for place in places if values[place] != NONE), None)) is not None:
                row[name] = value
        if "eval/accuracy" not in row and (
            held := [v for p in shape.heldout if (v := values[p]) != NONE and math.isfinite(v)]
        ):
            row["eval/accuracy"] = math.fsum(held) / len(held)
        generated = "completions/mean_length" in row and math.isfinite(row.get("grad_norm", math.nan))
        if generated and "reward" in shape.told and math.isnan(row.get("reward", math.nan)):  # no completion has any
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
                return row | {"skipped": 1.0, "overflow": f"metric ({', '.join(odd)})"}
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


def number(value: Any) -> float:
    """A number, of numpy or torch too, or written as text ("5/1000" counts 5); NONE for anything else."""
    if value is None or isinstance(value, bool) or getattr(value, "ndim", False):
        return NONE
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        whole = isinstance(value, str) and re.fullmatch(r"\s*(\d{1,15})\s*/\s*\d+\s*", value)
        return float(whole[1]) if whole else NONE
