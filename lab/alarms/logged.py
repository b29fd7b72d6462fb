"""Steps of runs that never were, as trainers log them: ours, TRL and verl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lab.alarms.uneven import Row
from oblrpo.diagnosis.course import finite
from oblrpo.runs.log_rows import Rows

LASTS = ("step", "grad_norm", "learning_rate")  # of several steps, TRL logs the last of these, and the mean of others


def thinned(rows: Sequence[Mapping[str, Any]], every: int) -> list[Row]:
    """Rows as TRL logs them every so many steps (`logging_steps`)."""
    if every == 1:
        return [dict(row) for row in rows]
    means: list[Row] = []
    for part in (rows[end - every : end] for end in range(every, len(rows) + 1, every)):
        values = {key: [number for row in part if (number := finite(row.get(key))) is not None] for key in part[-1]}
        means.append({k: each[-1] if k in LASTS else math.fsum(each) / len(each) for k, each in values.items() if each})
    return means


def as_ours(row: Row) -> Row:
    """A step as `oblrpo train` logs it, which makes no update where all completions earn the same."""
    if "reward_stderr" not in row:
        return row | {"lr_factor": 1.0, "skipped": 0.0}
    return row | dict.fromkeys(("grad_norm", "learning_rate", "lr_factor"), 0.0) | {"skipped": 1.0}


def as_trl(row: Row) -> Row:
    """A step as TRL logs it, which says nothing of the spread between prompts."""
    return {key: value for key, value in row.items() if key != "reward_stderr"}


VERL = {
    "step": "step", "reward": "critic/score/mean", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm",
    "kl": "actor/kl_loss", "learning_rate": "actor/lr", "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio", "eval/accuracy": "val-core/x/reward/mean@4",
}  # fmt: skip


def as_verl(row: Row) -> Row:
    """A step as verl logs it, in which only the least and the highest score tell that all are the same."""
    beyond = 2 * row["reward_std"]
    highest = row.get("reward_max", 0.0) + row["reward"] + beyond
    ends = {"critic/score/max": highest, "critic/score/min": row["reward"] - beyond}
    return Rows([{VERL[key]: value for key, value in row.items() if key in VERL} | ends])[0]


def as_mean(row: Row) -> Row:
    """A step of which the mean reward is all that is logged."""
    return {"step": row["step"], "reward": row["reward"]}


def as_confined(row: Row) -> Row:
    """A step whose rate is measured."""
    return {"step_kl": 0.09, "step_kl_target": 0.1} | row


def with_texts(row: Row) -> Row:
    """A step with what is logged of texts and tokens."""
    shares = {"same_ratio": 0.1, "commonest_ratio": 0.2, "commonest_token_ratio": 0.15}
    return {f"completions/{key}": share for key, share in shares.items()} | row


def with_swaps(row: Row) -> Row:
    """A step of which every tenth measures held-out accuracy, and what it loses as answers to other prompts."""
    accuracy = {"accuracy": row["reward"], "accuracy_stderr": 0.02}
    loss = {"swap_loss": 0.8 * row["reward"], "swap_loss_stderr": 0.02}
    return {f"eval/{key}": value for key, value in (accuracy | loss).items() if row["step"] % 10 == 0} | row


def with_ends(row: Row) -> Row:
    """A step of ours, with the lowest and the highest reward and their middle half."""
    beyond = row["reward_std"]
    return {"reward_min": row["reward"] - beyond, "reward_max": row["reward"] + beyond, "reward_iqr": beyond} | row
