"""Many training runs side by side: resumable, read back from their folders."""

import csv
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lab.tasks import ADDITION, COUNTDOWN
from oblrpo.compare.plan import PlannedRun
from oblrpo.compare.training import how_it_ended, start
from oblrpo.intervals import mean
from oblrpo.settings import TrainConfig, load_recipe, with_settings

SUMS = {"task": ADDITION, "task_args": {"max_terms": 4}, "max_completion_length": 24}

STARTS: dict[str, dict[str, Any]] = {
    # a task at a level of skill: settings of the supervised warm start, and of the task
    "path": {"warm_start_steps": 200},
    "addition": SUMS | {"warm_start_steps": 300, "warm_start_args": {"noise": 0.05}},
    "addition-high": SUMS | {"warm_start_steps": 500, "warm_start_args": {"noise": 0.02}},
    "countdown": {
        "task": COUNTDOWN, "max_completion_length": 24, "warm_start_steps": 800, "warm_start_args": {"noise": 0.05},
    },
}  # fmt: skip

Key = tuple[Any, ...]
Runs = Mapping[Key, tuple[Path, dict]]
"""Folder and settings over the demo's of each run, by its key."""


def train_all(runs: Runs, processes: int, ended: Callable[[Key], None] = lambda key: None) -> None:
    """Every run, or what is left of it, each in a process of its own and so many at a time; calls `ended` as each ends.

    Raises:
        RuntimeError: a run failed, or its process died; the others have been stopped.
    """
    waiting, running, at_once = list(runs), {}, max(1, min(processes, len(runs)))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                key = waiting.pop(0)
                run = run_of(*runs[key])
                running[key] = run, start(run, at_once)
            wait([process.sentinel for _, process in running.values()])
            for key in [key for key, (_, process) in running.items() if process.exitcode is not None]:
                run, process = running.pop(key)
                if process.exitcode:
                    _, why = run.failure() or ("", how_it_ended(process))
                    raise RuntimeError(f"{run.place}: {why}; its log: {run.log}")
                ended(key)
    finally:
        for _, process in running.values():
            process.terminate()


def run_of(output: Path, settings: dict) -> PlannedRun:
    """The run with these settings over the demo's, and with the weight decay of the published runs."""
    decay = {} if settings.get("optimizer") == "SGD" else {"optimizer_args": {"weight_decay": 0.01}}
    given = decay | settings | {"output": str(output)}
    config = with_settings(load_recipe("demo", TrainConfig()), given, output.name)
    return PlannedRun(output.name, config)


class Results:
    """What finished runs came to, in a CSV of one line a run: the parts of its key, then the numbers of interest.

    Lines that are in the file already stay, unless their run is there to be read.
    """

    def __init__(self, file: Path, key: Sequence[str], numbers: Mapping[str, Callable[[list[dict]], float]]) -> None:
        self.file, self.key, self.numbers = file, key, numbers
        self.lines: dict[tuple[str, ...], dict[str, float]] = {}
        if file.is_file():
            with file.open(newline="") as lines:
                for line in csv.DictReader(lines):
                    self.lines[tuple(line[part] for part in key)] = {name: float(line[name]) for name in numbers}

    def of(self, *key: object) -> dict[str, float] | None:
        """The numbers of a run, None of one that has not finished."""
        return self.lines.get(tuple(map(str, key)))

    def by_seed(self, *key: object, number: str, seeds: int) -> dict[int, float]:
        """A number of every finished run that has this key but for the seed, its last part."""
        found = {seed: self.of(*key, seed) for seed in range(seeds)}
        return {seed: numbers[number] for seed, numbers in found.items() if numbers}

    def add(self, key: Key, metrics: list[dict]) -> None:
        """A finished run; the file is written anew."""
        self.lines[tuple(map(str, key))] = {name: round(of(metrics), 4) for name, of in self.numbers.items()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*self.key, *self.numbers])
            writer.writerows([*parts, *(f"{n:.4f}" for n in numbers.values())] for parts, numbers in self.lines.items())


def rows(output: Path, steps: int) -> list[dict] | None:
    """Metrics of a finished run, None of one that has not got there."""
    file = output / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return found if found and found[-1]["step"] >= steps else None


def warm_starts(folder: Path, names: Iterable[str], seeds: int, processes: int) -> dict[tuple[str, int], Path]:
    """A warm-started policy for each task and seed, trained once."""
    starts = {(name, seed): folder / f"warm_{name}_{seed}" for seed in range(seeds) for name in names}
    missing = {
        (name, seed): (path, STARTS[name] | {"steps": 0, "seed": seed})
        for (name, seed), path in starts.items()
        if rows(path, 0) is None
    }
    train_all(missing, processes)
    return {key: path / "checkpoints" / "step_0" for key, path in starts.items()}


def after_start(name: str, policy: Path) -> dict:
    """Settings of a run that goes on from a task's warm start."""
    return STARTS[name] | {"warm_start_steps": 0, "model": str(policy)}


def run_all(runs: Runs, steps: int, processes: int, results: Results) -> None:
    """Every run that is not finished, some at a time; keeps what each comes to, and prints its final accuracy."""
    begun = time.monotonic()

    def keep(key: Key) -> None:
        metrics = rows(runs[key][0], steps)
        results.add(key, metrics)
        print(*key, f"{metrics[-1]['eval/accuracy']:.3f}  ({(time.monotonic() - begun) / 60:.1f} min)", flush=True)

    finished = {key: metrics for key, (path, _) in runs.items() if (metrics := rows(path, steps))}
    for key, metrics in finished.items():
        results.add(key, metrics)
    missing = {key: (path, given | {"steps": steps}) for key, (path, given) in runs.items() if key not in finished}
    train_all(missing, processes, keep)


def mean_interval(values: list[float]) -> str:
    """Mean over seeds with a 95 % interval by Student's t, which says nothing of two seeds."""
    if not values:
        return ""
    found = mean(values)
    return f"{found.value:.3f}" + (f" +- {found.margin:.3f}" if found.n > 2 else "")
