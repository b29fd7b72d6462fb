"""Many training runs side by side: resumable, read back from their folders."""

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % quantile, by number of seeds."""

STARTS = {
    # a task at a level of skill: settings of the supervised warm start, and of the task
    "path": ["--warm-start-steps", "200"],
    "addition": ["--task", "addition", "--task-args", "{max_terms: 4}", "--max-completion-length", "24",
                 "--warm-start-steps", "300", "--warm-start-noise", "0.05"],
    "addition-high": ["--task", "addition", "--task-args", "{max_terms: 4}", "--max-completion-length", "24",
                      "--warm-start-steps", "500", "--warm-start-noise", "0.02"],
    "countdown": ["--task", "countdown", "--max-completion-length", "24", "--warm-start-steps", "800",
                  "--warm-start-noise", "0.05"],
}  # fmt: skip


def train(output: Path, *settings: object) -> None:
    """One run in a process of its own, or what is left of it."""
    resume = ["--resume"] if (output / "config.yaml").is_file() else []
    command = [sys.executable, "-c", "from oblrpo.cli import main; main()", "train", "demo", "--output", str(output)]
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f"{output.name}.log").open("a") as log:
        subprocess.run([*command, *map(str, settings), *resume], stdout=log, stderr=log, check=True)


def rows(output: Path, steps: int) -> list[dict] | None:
    """Metrics of a finished run, None of one that has not got there."""
    file = output / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return found if found and found[-1]["step"] >= steps else None


def warm_starts(folder: Path, names: Iterable[str], seeds: int, processes: int) -> dict[tuple[str, int], Path]:
    """A warm-started policy for each task and seed, trained once."""
    starts = {(name, seed): folder / f"warm_{name}_{seed}" for seed in range(seeds) for name in names}

    def one(key: tuple[str, int]) -> None:
        name, seed = key
        if rows(starts[key], 0) is None:
            train(starts[key], "--steps", 0, "--seed", seed, *STARTS[name])

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, starts))
    return {key: path / "checkpoints" / "step_0" for key, path in starts.items()}


def task_settings(name: str) -> list[str]:
    """What a run on the task needs, without its warm start."""
    settings = STARTS[name]
    cut = settings.index("--warm-start-steps")
    return [*settings[:cut], "--warm-start-steps", "0"]


def run_all(runs: Mapping[tuple, tuple[Path, list]], steps: int, processes: int) -> None:
    """Every run that is not finished, some at a time; prints each as it ends."""

    def one(key: tuple) -> None:
        output, settings = runs[key]
        if rows(output, steps) is None:
            train(output, *settings, "--steps", steps)
            print(*key, f"{rows(output, steps)[-1]['eval/accuracy']:.3f}", flush=True)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, runs))


def mean_interval(values: list[float]) -> str:
    """Mean over seeds with a 95 % interval by Student's t."""
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    margin = STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} +- {margin:.3f}"


def write_csv(
    path: Path, names: list[str], runs: Mapping[tuple, tuple[Path, list]], steps: int, value: Callable
) -> None:
    """A line a finished run: its key and what `value` makes of its metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for index, (key, (output, _)) in enumerate(runs.items()):
            metrics = rows(output, steps)
            if index == 0:
                writer.writerow(names)
            if metrics is not None:
                writer.writerow([*key, *value(metrics)])
