"""Logs that others have written: TRL's state, verl's lines, and any table of metrics, under our names."""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from oblrpo.errors import InputError
from oblrpo.regular_files import regular
from oblrpo.runs.rows import Metrics

STATE = "trainer_state.json"

NAMES: dict[str, tuple[str, ...]] = {
    # our name, which is TRL's where TRL has one, and what others call it; of several that are there the first counts
    "step": ("step", "global_step", "training/global_step", "_step", "Step", "iteration"),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "objective/scores", "reward/mean", "reward_mean",
               "mean_reward"),
    "reward_std": ("reward_std", "reward/std"),
    "reward_min": ("reward_min", "critic/score/min", "critic/rewards/min", "reward/min"),
    "reward_max": ("reward_max", "critic/score/max", "critic/rewards/max", "reward/max"),
    "frac_reward_zero_std": ("frac_reward_zero_std", "zero_std_ratio", "frac_zero_std"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "policy/entropy_avg", "objective/entropy",
                "policy/entropy"),
    "kl": ("kl", "actor/kl_loss", "critic/kl", "actor/reward_kl_penalty", "objective/kl", "kl_mean"),
    "completions/mean_length": ("completions/mean_length", "response_length/mean", "completion_length",
                                "response_length", "mean_length"),
    "completions/clipped_ratio": ("completions/clipped_ratio", "response_length/clip_ratio", "clipped_ratio"),
    "grad_norm": ("grad_norm", "actor/grad_norm", "gradient_norm"),
    "learning_rate": ("learning_rate", "actor/lr_used", "actor/lr", "lr"),
    "baseline/spread": ("baseline/spread", "critic/baseline/spread"),
    "loss": ("loss", "actor/pg_loss"),
    "clip_ratio/region_mean": ("clip_ratio/region_mean", "actor/pg_clipfrac", "clip_ratio", "policy/clipfrac_avg",
                               "clip_fraction"),
    "sampling/sampling_logp_difference/mean": ("sampling/sampling_logp_difference/mean",
                                               "rollout_corr/log_ppl_abs_diff"),
    "eval/accuracy": ("eval/accuracy", "eval_reward", "eval/reward", "eval_accuracy"),
}  # fmt: skip
KNOWN = {name for names in NAMES.values() for name in names}

HELD_OUT = re.compile(
    r"(val-core/.*/mean@\d+|val/test_score/.*|(eval|val|validation|test|held_?out)[_/].*(accuracy|acc|reward|score|pass@1))"
)
"""Other names of a held-out accuracy; of several the mean counts."""

VITAL = ("reward", "loss", "grad_norm", "kl", "entropy")
"""Metrics of which a NaN or an infinity means that numbers have overflowed."""

CONSOLE = re.compile(r"(?:^|\s)step:(\d+) - (\S.*)$")
"""A step of verl's console logger: `step:7 - actor/entropy:0.31 - critic/score/mean:0.5`."""


class Log(NamedTuple):
    """What a log holds."""

    rows: list[Metrics]
    """A row a step, under our names: numbers, and None for what is not finite."""
    steps: int
    """How many steps the run was to make; 0: unknown."""
    source: str


def read_log(path: Path) -> Log | None:
    """Read the log of another trainer: a folder of TRL's, a state, JSON Lines, CSV, or what verl has printed.

    Returns None for a folder without one.

    Raises:
        InputError: there is no such file, it cannot be read, or holds no metric that is known.
    """
    try:
        folder = path.is_dir()
        data = b"" if folder else regular(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path!s:.999} cannot be read ({reason}); give the folder of a run, or its log.") from None
    if folder:
        return newest_state(path)
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell writes
    text = data.decode("utf-16" if wide else "utf-8", "replace").replace("\ufeff", "")
    if path.name == STATE or (text.lstrip()[:1] == "{" and '"log_history"' in text):
        return read_state(path)
    entries, source = _entries(text)
    return Log(known(rows_of(entries), str(path)), 0, source)


def known(rows: list[Metrics], name: str) -> list[Metrics]:
    """Return rows that were read; `name` says where.

    Raises:
        InputError: they hold no metric that is known.
    """
    if (NAMES.keys() - {"step"} | {"skipped"}).isdisjoint(chain.from_iterable(rows)):
        raise InputError(
            f"{name} holds no metric that is known, such as reward, entropy or grad_norm: give the trainer_state.json "
            "of TRL, what verl prints or writes, or JSON Lines, CSV or rows with the names of either."
        )
    return rows


def state_files(run: Path) -> list[Path]:
    """The `trainer_state.json` of a folder of TRL's and of its folders checkpoint-N, the newest first."""
    numbered = [(file.parent.name.removeprefix("checkpoint-"), file) for file in run.glob(f"checkpoint-*/{STATE}")]
    newest = sorted(((int(number), file) for number, file in numbered if number.isdecimal()), reverse=True)
    return [file for file in (run / STATE, *(file for _, file in newest)) if file.is_file()]


def newest_state(run: Path) -> Log | None:
    """Read the state of a folder of TRL's that goes farthest of those that are whole; None if there is none.

    Raises:
        InputError: all of them are damaged.
    """
    found: list[Log] = []
    damaged: list[InputError] = []
    for file in state_files(run):
        try:
            found.append(read_state(file)._replace(source=f"TRL, {file.relative_to(run)}"))
        except InputError as error:
            damaged.append(error)
            continue
        if found[-1].rows and file.parent != run:
            break
    if damaged and not found:
        raise damaged[0]
    newest = max(found, key=lambda log: log.rows[-1]["step"] if log.rows else -1, default=None)
    unread = "".join(f"; {str(error).rpartition(';')[0]}" for error in damaged)
    return newest and newest._replace(source=newest.source + unread)


def read_state(file: Path) -> Log:
    """Read a `trainer_state.json`.

    Raises:
        InputError: it is damaged.
    """
    try:
        state = dict(json.loads(regular(file).read_bytes()))
        entries = [dict(entry) | {"step": _whole(entry["step"])} for entry in state["log_history"]]
        return Log(rows_of(entries), _whole(state["max_steps"]), f"TRL, {file.name}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise InputError(
            f"{file} cannot be read as a log of TRL's ({reason}); give the folder of another checkpoint."
        ) from None


def rows_of(entries: Iterable[Mapping[str, Any]]) -> list[Metrics]:
    """Entries of a log as rows, one a step in the order of steps; those of one step are joined."""
    merged: dict[int, Metrics] = {}
    for number, entry in enumerate(entries, start=1):
        if isinstance(data := entry.get("data"), Mapping):  # what verl writes
            entry = {**data, "step": entry.get("step")}
        numbers = {key: value for key, raw in entry.items() if (value := _number(raw)) is not None}
        if math.isnan(numbers.get("learning_rate", 0.0)):  # pandas has NaN for what a row does not have
            numbers = {key: value for key, value in numbers.items() if not math.isnan(value)}
        named = _named(numbers)
        step = named.pop("step", None)
        step = int(step) if step is not None and math.isfinite(step) else number
        row = merged.setdefault(step, {"step": step})
        row.update({key: value for key, value in named.items() if value is not None or key not in row})
    return [merged[step] for step in sorted(merged)]


def _named(numbers: Mapping[str, float]) -> Metrics:
    """Numbers under our names beside their own; what is not finite is None, and `skipped` is 1 where that is vital."""
    plain = {key.removeprefix("train/"): value for key, value in numbers.items()}
    plain = {key.removeprefix("actor/"): value for key, value in plain.items()} | plain  # ours, in verl
    for name, others in NAMES.items():
        if found := next((other for other in others if other in plain), None):
            plain[name] = plain[found]
    if "eval/accuracy" not in plain and (held_out := [v for key, v in plain.items() if HELD_OUT.fullmatch(key)]):
        plain["eval/accuracy"] = math.fsum(held_out) / len(held_out)
    low, high = plain.get("clip_ratio/low_mean"), plain.get("clip_ratio/high_mean")
    if "clip_ratio/region_mean" not in plain and low is not None and high is not None:
        plain["clip_ratio/region_mean"] = low + high
    if vital := [key for key in VITAL if key in plain]:
        odd = [key for key in vital if not math.isfinite(plain[key])]
        plain["skipped"] = max(plain.get("skipped", 0.0), float(bool(odd)))
    row: Metrics = {key: value if math.isfinite(value) else None for key, value in plain.items()}
    return row | ({"overflow": f"metric ({', '.join(odd)})"} if vital and odd else {})


def _entries(text: str) -> tuple[list[Mapping[str, Any]], str]:
    """The entries of a text, and what it was taken for."""
    if text.lstrip()[:1] == "[" and isinstance(listed := _json(text), list):
        return [entry for entry in listed if isinstance(entry, dict)], "a JSON list"
    # split, not splitlines: texts in JSON may hold characters that splitlines takes for line ends
    lines = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*m", "", text)) if line.strip()]
    if printed := [match for line in lines if (match := CONSOLE.search(line)) and line[0] != "{"]:
        return [{"step": match[1], **_printed(match[2])} for match in printed], "what verl prints"
    entries: list[Mapping[str, Any]] = []
    kinds, head, unread, place = dict[str, None](), list[str](), 0, 0
    while place < len(lines):
        line, place = lines[place], place + 1
        if isinstance(entry := _json(line), dict):
            entries.append(entry)
            kinds["JSON Lines"] = None
            continue
        fields = _fields(line)
        if head and line.count('"') % 2:  # a field of several lines, or a quote that opens nothing
            end = next((n for n in range(place, len(lines)) if lines[n].count('"') % 2), place - 1)
            fields = _fields("\n".join(lines[place - 1 : end + 1]))
            place = end + 1 if len(fields) == len(head) else place
        if any(field.removeprefix("train/") in KNOWN for field in fields) and not any(map(_number, fields)):
            head = fields
        elif head and len(fields) == len(head):
            entries.append(dict(zip(head, fields, strict=True)))
            kinds["CSV"] = None
        else:
            unread += 1
    return entries, " and ".join(kinds) + (f" (lines not read: {unread})" if unread else "")


def _fields(text: str) -> list[str]:
    """The fields of a row of a CSV; none where it is no such thing."""
    try:
        return [field.strip() for field in next(csv.reader(text.splitlines(keepends=True), strict=True))]
    except csv.Error:
        return []


def _printed(text: str) -> dict[str, str]:
    pairs = (part.rsplit(":", 1) for part in text.split(" - "))
    return {pair[0].strip(): re.sub(r"^np\.\w+\((.*)\)$", r"\1", pair[1].strip()) for pair in pairs if len(pair) == 2}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(value: Any) -> float | None:
    """A number, of numpy or torch too, or written as text; None for anything else."""
    if isinstance(value, bool) or getattr(value, "ndim", False):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.50} is no number of steps")
    return value
