"""The record of a run on the disk, ours or TRL's, finished or not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.intervals import Z95
from oblrpo.report.episodes import in_a_line, is_episode
from oblrpo.runs import HELD_OUT, Metrics, RunFolder
from oblrpo.runs.logs import newest_state
from oblrpo.settings import IDENTITY, TrainConfig, flatten, read_yaml_file
from oblrpo.tables.algorithms import ALGORITHMS

LAST_STEPS = 20  # steps over which a run's figures at its end are averaged


@dataclass(eq=False)
class RunRecord:
    """What a run has left so far."""

    folder: RunFolder
    settings: dict[str, Any]  # the settings in `config.yaml`, by flag
    rows: list[Metrics]  # the rows of `metrics.jsonl`; step 0 holds the held-out accuracy alone
    failure: str  # the reason why the run ended, if it failed
    absent: Mapping[str, str] = field(default_factory=dict)
    """What the page cannot show, of a run of another trainer, and how to get it."""
    about: str = ""  # what the task is, in a sentence

    def __post_init__(self) -> None:
        self.steps = [row for row in self.rows if "reward" in row]  # of RL
        self.measured = [row for row in self.rows if row.get("eval/accuracy") is not None]
        self.done = int(self.rows[-1]["step"])
        self.finished = self.done >= self.integer("steps")
        self.ended = self.finished or bool(self.failure)  # it does not continue by itself
        self.prompts = self.integer("prompts_per_step")  # P

    def number(self, key: str) -> float:
        """Return a setting that is a number; 0 if it is not there."""
        value = self.settings.get(key, 0.0)
        if not isinstance(value, (int, float)):
            raise InputError(f"{self.folder.config_file}: {key} is {value!r}, but it must be a number.")
        return value

    def integer(self, key: str) -> int:
        """Return a setting that is a whole number; 0 if it is not there."""
        value = self.number(key)
        if not isinstance(value, int) and value:
            raise InputError(f"{self.folder.config_file}: {key} is {value!r}, but it must be a whole number.")
        return int(value)

    def of_algorithm(self, part: str) -> str:
        """Return what the run trains with, such as its `baseline` or its `schedule`; empty if it is not known."""
        algorithm = ALGORITHMS.get(str(self.settings.get("algorithm")))
        return str(self.settings.get(part) or (getattr(algorithm, part) if algorithm else ""))

    def completions(self, step: int) -> list[dict[str, Any]]:
        """Return the completions of a step; none if they are not there."""
        return completions_in(self.folder, step, "", "baseline", "advantage")


def completions_in(folder: RunFolder, step: int, of: str, *further: str) -> list[dict[str, Any]]:
    """Return the completions of a step that `RunFolder.read_completions` reads, each with what it must have.

    The `completion` of an episode is its turns in a line.
    """
    rows, texts = folder.read_completions(step, of), ("prompt", "completion")
    for number, row in enumerate(rows, start=1):
        missing = {"reward", *further} - row.keys() | {key for key in texts if not isinstance(row.get(key), str)}
        missing |= set() if is_episode(row.get("messages", [])) else {"messages"}
        if missing:
            file = folder.completions / f"{of}step_{step}.jsonl"
            raise InputError(f"{file} line {number} has no {min(missing)}; remove that line.")
        if "messages" in row:
            row["completion"] = in_a_line(row)
    return rows


def before_and_after(folder: RunFolder, measured: Sequence[Metrics], most: int = 8) -> list[dict[str, Any]]:
    """The first held-out prompts, with what the policy said to each when it was first measured, and when it was last.

    Each is {prompt, answer, before, after}, and before and after are the first completion of the prompt with its reward
    and, of an episode, its messages; empty where the run keeps no completions of two measurements.
    """
    if len(measured) < 2:
        return []
    rows = [completions_in(folder, measured[place]["step"], HELD_OUT) for place in (0, -1)]
    before, after = ({row["prompt"]: row for row in reversed(each)} for each in rows)
    return [
        {"prompt": prompt, "answer": before[prompt].get("answer", "")}
        | {
            when: {key: value for key, value in each[prompt].items() if key not in ("prompt", "answer")}
            for when, each in (("before", before), ("after", after))
        }
        for prompt in dict.fromkeys(row["prompt"] for row in rows[0] if row["prompt"] in after)
    ][:most]


def reward_of(completion: Mapping[str, Any]) -> str:
    """Return what a completion earned, in figures."""
    return "masked" if completion["reward"] is None else f"{completion['reward']:.3g}"


def of_last(count: int, what: str) -> str:
    """Return how many steps, say, a figure at the end is of."""
    return f"the last {count} {what}s" if count > 1 else f"the only {what}"


def accuracy_margin(row: Metrics) -> float | None:
    """Return the half-width of the 95 % interval of a step's held-out accuracy; None where it has none."""
    error = row.get("eval/accuracy_stderr")
    return None if error is None or math.isnan(error) else Z95 * error


def accuracy(row: Metrics, sign: str = "+-") -> str:
    """Return a step's held-out accuracy with half of its 95 % interval, in figures."""
    margin = accuracy_margin(row)
    return f"{row['eval/accuracy']:.3f}" + ("" if margin is None else f" {sign} {margin:.3f}")


PLACES = {"recipe", "output", "threads", "report_to", "project", "log_completions"}
"""Settings that say where a run was made, and nothing of the model."""


def changed_settings(settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from their defaults, each with its default."""
    defaults = flatten(TrainConfig())
    pairs = {key: (value, defaults[key]) for key, value in settings.items() if key in defaults}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def read_run(run: Path) -> RunRecord | None:
    """Read the complete lines of the run in a folder; None if it has not finished a step yet, not even step 0."""
    folder = RunFolder(run)
    if not folder.config_file.is_file():
        return None
    failure = folder.failure()  # before the rows: one that comes meanwhile is seen the next time
    try:
        rows = folder.read_metrics()
    except OSError as error:
        raise InputError(f"{folder.metrics_file} cannot be read ({error.strerror}).") from None
    if not rows:
        return None
    settings = read_yaml_file(folder.config_file)
    identity = settings.pop(IDENTITY, None)
    about = identity.get("about") if isinstance(identity, dict) else None
    return RunRecord(folder, settings, rows, failure, about=about if isinstance(about, str) else "")


def read_any(run: Path) -> RunRecord:
    """Read the run in a folder, ours or of TRL."""
    if record := read_run(run) or read_trl(run):
        return record
    raise InputError(
        f"{run} holds no config.yaml and metrics.jsonl with a finished step, nor a trainer_state.json of TRL; give the "
        "folder of a run."
    )


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


def critical_batch(steps: Sequence[Metrics]) -> float | None:
    """Return the number of prompts at which noise equals signal, as the newest of the steps that measured it has it.

    None where it is not known: where SNR has no interval yet, or one that reaches 0.
    """
    measured = (row for row in reversed(steps) if row.get("n_snr") is not None and row.get("grad_norm") != 0)
    newest = next(measured, {})
    known = (newest.get("snr_low") or 0) > 0 and newest.get("critical_batch_size") is not None
    return float(newest["critical_batch_size"]) if known else None
