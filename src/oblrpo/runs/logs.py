"""Logs that others have written: TRL's state, verl's lines, and any table of metrics, under our names."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oblrpo.errors import InputError
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
    if path.is_dir():
        logs = [read_state(file) for file in state_files(path)]
        return max(logs, key=lambda log: log.rows[-1]["step"] if log.rows else -1, default=None)
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give the folder of a run, or its log.") from None
    if path.name == STATE or (text.lstrip()[:1] == "{" and '"log_history"' in text):
        return read_state(path)
    entries, source = _entries(text)
    rows = rows_of(entries)
    known = set().union(*rows) - {"step"} if rows else set()
    if not known & NAMES.keys():
        raise InputError(
            f"{path} holds no metric that is known, such as reward, entropy or grad_norm: give the trainer_state.json "
            "of TRL, what verl prints or writes, or JSON Lines or CSV with TRL's names."
        )
    return Log(rows, 0, source)


def state_files(run: Path) -> list[Path]:
    """The `trainer_state.json` of a folder of TRL's and of the last of its folders checkpoint-N, if they are there."""
    numbered = {
        int(file.parent.name.removeprefix("checkpoint-")): file
        for file in run.glob(f"checkpoint-*/{STATE}")
        if file.parent.name.removeprefix("checkpoint-").isdecimal()
    }
    return [file for file in (run / STATE, numbered[max(numbered)] if numbered else None) if file and file.is_file()]


def read_state(file: Path) -> Log:
    """Read a `trainer_state.json`.

    Raises:
        InputError: it is damaged.
    """
    try:
        state = dict(json.loads(file.read_text("utf-8")))
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
        numbers = {key: value for key, raw in entry.items() if (value := _number(raw)) is not None}
        named = _named(numbers)
        step = named.pop("step", None)
        step = int(step) if step is not None and math.isfinite(step) else number
        merged.setdefault(step, {"step": step}).update(named)
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
    if vital := [plain[key] for key in VITAL if key in plain]:
        plain["skipped"] = float(not all(map(math.isfinite, vital)))
    return {key: value if math.isfinite(value) else None for key, value in plain.items()}


def _entries(text: str) -> tuple[list[Mapping[str, Any]], str]:
    """The entries of a text, and what it was taken for."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    if printed := [match for line in lines if (match := CONSOLE.search(line))]:
        return [{"step": match[1], **_printed(match[2])} for match in printed], "what verl prints"
    if text.lstrip()[:1] == "[":
        return [entry for entry in _json(text) or [] if isinstance(entry, dict)], "a JSON list"
    objects = [entry for line in lines if isinstance(entry := _json(line), dict)]
    flat: list[Mapping[str, Any]]
    if objects:
        flat = [
            {**entry["data"], "step": entry.get("step")} if isinstance(entry.get("data"), dict) else entry
            for entry in objects
        ]
        return flat, "JSON Lines"
    return list(csv.DictReader(io.StringIO("\n".join(lines)))), "CSV"


def _printed(text: str) -> dict[str, str]:
    pairs = (part.rsplit(":", 1) for part in text.split(" - "))
    return {pair[0].strip(): re.sub(r"^np\.\w+\((.*)\)$", r"\1", pair[1].strip()) for pair in pairs if len(pair) == 2}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> float | None:
    """A number, also where it is written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.50} is no number of steps")
    return value
