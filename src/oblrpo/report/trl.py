"""The record of a run of TRL: the log in its `trainer_state.json`, and what it does not hold."""

from pathlib import Path

from oblrpo.report.record import RunRecord
from oblrpo.runs import RunFolder
from oblrpo.runs.logs import newest_state

ABSENT = {
    # what the page would show: a key that its chart is drawn from, and how to get it
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


def read_trl(run: Path) -> RunRecord | None:
    """Read what a run of TRL left in a folder; None if there is no state, or not a step in it."""
    log = newest_state(run)
    if log is None or not log.rows:
        return None
    rows, last = list(log.rows), log.steps
    source, _, damaged = log.source.partition("; ")
    taken = {key for row in rows for key, value in row.items() if value is not None}
    absent = {"Newest state": damaged} if damaged else {}
    absent |= {name: how for name, (key, how) in ABSENT.items() if key not in taken}
    if rows[-1]["step"] < last:
        absent["Later steps"] = f"the log ends with step {rows[-1]['step']} of {last}; TRL writes it with checkpoints"
    # N, the number of prompts a step, is N SNR over SNR.
    prompts = (round(row["n_snr"] / row["snr"]) for row in reversed(rows) if row.get("snr") and row.get("n_snr"))
    settings = {
        "algorithm": source,
        "schedule": "of OBLRPOTrainer" if "lr_factor" in taken else "of TRL",
        "steps": last,
        "prompts_per_step": next(prompts, 0),
    }
    return RunRecord(RunFolder(run), settings, rows, "", absent)
