"""Lines of JSON that a run has written: which are complete, and which are of a step."""

import json
import math
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError

Metrics = dict[str, Any]
NEEDED = ("reward", "learning_rate", "lr_factor", "step_time")
"""Metrics that are read of every step of RL, and are numbers; any other may be missing, as in logs of earlier versions
and of other trainers."""


def read_rows(path: Path, is_row: Callable[[Metrics], bool] = lambda row: True) -> list[Metrics]:
    """Return the complete lines of a JSONL file; what follows the last newline is unfinished."""
    rows = []
    # split, not splitlines: completions may hold characters that splitlines takes for line ends
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        row = parsed(line)
        if row is None or not is_row(row):
            what = "no JSON object" if row is None else "not a row of a step"
            raise InputError(f"{path} line {number} is damaged ({what}); remove that line.")
        rows.append(row)
    return rows


def read_steps(path: Path) -> list[Metrics]:
    """Return the metrics of all steps in a file, whose numbers increase."""
    rows = read_rows(path, is_of_a_step)
    for number, (before, row) in enumerate(pairwise(rows), start=2):
        if row["step"] <= before["step"]:
            raise InputError(
                f"{path} line {number} is damaged (step {row['step']} after step {before['step']}); remove that line."
            )
    return rows


def kept_and_damaged(lines: Iterable[bytes], last: int) -> tuple[list[Metrics], list[bytes]]:
    """Return the rows of steps up to the last, in order, and the lines that are damaged; later steps are forgotten."""
    kept: list[Metrics] = []
    damaged = []
    for line in lines:
        row = parsed(line)
        if row is None or not (is_of_a_step(row) and _has_all(row)):
            damaged.append(line)
        elif row["step"] <= last:
            if kept and row["step"] <= kept[-1]["step"]:
                damaged.append(line)
            else:
                kept.append(row)
    return kept, damaged


def parsed(line: bytes) -> Metrics | None:
    """The JSON object of a line, None if it is none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_of_a_step(row: Metrics) -> bool:
    """Whether a row has the number of its step, and no other values than finite numbers, nulls and warnings."""
    step, warnings = row.get("step"), row.get("warnings", [])
    return (
        isinstance(step, int)
        and step >= 0
        and isinstance(warnings, list)
        and all(isinstance(sentence, str) for sentence in warnings)
        and all(value is None or _is_number(value) for key, value in row.items() if key != "warnings")
    )


def _has_all(row: Metrics) -> bool:
    """Whether a row of a step of RL has what is read of each of them; step 0 holds an accuracy alone."""
    if row["step"] == 0 and "reward" not in row:
        return True
    needed = NEEDED[row.get("frac_prompts_masked") == 1 :]  # there is no reward where all completions were masked
    return all(_is_number(row.get(key)) for key in needed)


def _is_number(value: object) -> bool:
    most = sys.float_info.max
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -most <= value <= most


def heldout_accuracy_of(rows: Iterable[Metrics]) -> dict[int, float]:
    """Held-out accuracy by step, where it was measured and any completion had a reward."""
    measured = ((row["step"], row.get("eval/accuracy")) for row in rows)
    return {step: value for step, value in measured if value is not None and math.isfinite(value)}
