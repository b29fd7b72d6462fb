"""The record of a run of TRL: the log in its `trainer_state.json`, and what it does not hold."""

import json
import math
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.report.record import RunRecord
from oblrpo.runs import Metrics, RunFolder

STATE = "trainer_state.json"
EVALUATED = "eval_reward"  # TRL's mean reward over the completions of `eval_dataset`

ABSENT = {
    # what the page would show: a key that its chart is drawn from, and how to have it
    "Held-out reward": ("eval/accuracy", "give the trainer an eval_dataset, eval_strategy and eval_steps"),
    "Signal, noise and the critical batch": (
        "n_snr", "train with OBLRPOTrainer, or add a VarianceLedgerCallback",
    ),
    "Variance under each baseline": ("variance/rloo", "add a VarianceLedgerCallback"),
    "Score norms": ("score_norm2/mean", "train with OBLRPOTrainer"),
    "Samples, and score norms by completion": ("", "the tables that log_completions writes are not read"),
    "Bands around the reward": ("", "TRL logs no standard error over prompts"),
    "Settings": ("", "training_args.bin is a pickle, which could run anything; it is not opened"),
}  # fmt: skip


def state_files(run: Path) -> list[Path]:
    """The `trainer_state.json` of a folder of TRL's and of the last of its folders checkpoint-N, if they are there."""
    numbered = {
        int(file.parent.name.removeprefix("checkpoint-")): file
        for file in run.glob(f"checkpoint-*/{STATE}")
        if file.parent.name.removeprefix("checkpoint-").isdecimal()
    }
    return [file for file in (run / STATE, numbered[max(numbered)] if numbered else None) if file and file.is_file()]


def read_trl(run: Path) -> RunRecord | None:
    """Read what a run of TRL left in a folder; None if there is no state, or not a step in it."""
    logs = [(*_read(file), file) for file in state_files(run)]
    if not logs:
        return None
    rows, last, file = max(logs, key=lambda log: log[0][-1]["step"] if log[0] else -1)
    if not rows:
        return None
    taken = {key for row in rows for key, value in row.items() if value is not None}
    absent = {name: how for name, (key, how) in ABSENT.items() if key not in taken}
    if rows[-1]["step"] < last:
        absent["Later steps"] = f"the log ends with step {rows[-1]['step']} of {last}; TRL writes it with checkpoints"
    # N, the number of prompts a step, is N SNR over SNR.
    prompts = (round(row["n_snr"] / row["snr"]) for row in reversed(rows) if row.get("snr") and row.get("n_snr"))
    settings = {
        "algorithm": f"TRL, {file.relative_to(run)}",
        "schedule": "of OBLRPOTrainer" if "lr_factor" in taken else "of TRL",
        "steps": last,
        "prompts_per_step": next(prompts, 0),
    }
    return RunRecord(RunFolder(run), settings, rows, "", absent)


def _read(file: Path) -> tuple[list[Metrics], int]:
    """The log by step under our names, and the number of steps that the run was to make."""
    try:
        state = dict(json.loads(file.read_text("utf-8")))
        merged: dict[int, Metrics] = {}
        for entry in state["log_history"]:
            step = _whole(entry["step"])
            merged.setdefault(step, {"step": step}).update(_row(entry))
        return [merged[step] for step in sorted(merged)], _whole(state["max_steps"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise InputError(
            f"{file} cannot be read as a log of TRL's ({reason}); give the folder of another checkpoint."
        ) from None


def _row(entry: dict[str, Any]) -> Metrics:
    """The numbers of one entry of the log; what is not finite is None."""
    numbers = {
        key: value if math.isfinite(value) else None
        for key, value in entry.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step"
    }
    if EVALUATED in numbers:
        numbers["eval/accuracy"] = numbers[EVALUATED]
    return numbers


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.50} is no number of steps")
    return value
