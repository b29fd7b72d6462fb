"""What runs came to: a CSV a part, some lines a run, from which tables and pictures are made."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

LINES = 24
"""At how many evenly spaced steps a run is noted, at the most."""


class Run(NamedTuple):
    """What tells a run from all others of its part."""

    policy: str
    prompts: int
    generations: int
    arm: str
    rate: str
    """The rate that is held, or from which a measured one starts."""
    seed: int

    @property
    def place(self) -> str:
        """The name of its folder."""
        return "_".join(map(str, self)).replace(":", "-")


class Line(NamedTuple):
    """A step of a run; what is measured between two lines is the mean over the steps since the last one."""

    step: int
    completions: int
    cpu_seconds: float
    """Of training since the run's beginning, without measurements of held-out accuracy."""
    reward: float
    accuracy: float | None
    learning_rate: float
    kl: float


class Book:
    """The lines of a part's runs; each run is added as a whole, and the file is written anew."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[Run, list[Line]] = {}
        if file.is_file():
            with file.open(newline="") as lines:
                for row in csv.DictReader(lines):
                    run = Run(row["policy"], int(row["prompts"]), int(row["generations"]), row["arm"], row["rate"],
                              int(row["seed"]))  # fmt: skip
                    line = Line(
                        int(row["step"]), int(row["completions"]), float(row["cpu_seconds"]), float(row["reward"]),
                        float(row["accuracy"]) if row["accuracy"] else None, float(row["learning_rate"]),
                        float(row["kl"]),
                    )  # fmt: skip
                    self.runs.setdefault(run, []).append(line)

    def add(self, run: Run, metrics: list[dict[str, Any]]) -> None:
        """A finished run, from its metrics, which begin with step 0."""
        self.runs[run] = list(lines_of(run, metrics))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Run._fields, *Line._fields])
            for key, lines in self.runs.items():
                writer.writerows([*key, *("" if value is None else value for value in line)] for line in lines)

    def ends(self, keep: Callable[[Run], bool] = lambda run: True) -> dict[Run, float]:
        """Accuracy after the last step of the runs that are kept."""
        ends = {run: lines[-1].accuracy for run, lines in self.runs.items() if keep(run)}
        return {run: accuracy for run, accuracy in ends.items() if accuracy is not None}


def lines_of(run: Run, metrics: list[dict[str, Any]]) -> Iterable[Line]:
    """The steps of a run that are noted: those with a held-out accuracy, and evenly spaced ones."""
    last = metrics[-1]["step"]
    every = max(1, round(last / LINES))
    since: list[dict[str, Any]] = []
    spent = 0.0
    for row in metrics:
        spent += row.get("cpu_time", 0.0)
        since.append(row)
        if row.get("eval/accuracy") is None and row["step"] % every:
            continue
        rewards = [each["reward"] for each in since if each.get("reward") is not None]
        nats = [each["step_kl"] for each in since if each.get("step_kl") is not None]
        measured = (
            spent, _mean(rewards), row.get("eval/accuracy"), row.get("learning_rate", 0.0), _mean(nats),
        )  # fmt: skip
        rounded = [None if value is None else float(f"{value:.4g}") for value in measured]  # as the CSV has it
        yield Line(row["step"], row["step"] * run.prompts * run.generations, *rounded)  # type: ignore[arg-type]
        since = []


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
