"""Held-out accuracy of a comparison's runs over completions and over seconds of training.

    python -m lab.benchmarks.curves runs/lora --csv docs/results/smollm2-lora.csv [--seconds 120 240 480]
    python -m lab.benchmarks.curves --csv docs/results/smollm2-lora.csv

Reads the runs that `oblrpo compare` left in a folder, or the CSV that was kept of them. Of each variant and rate: means
over seeds with 95 % intervals by Student's t. A step's seconds are the mean over the steps of its run in which accuracy
was not measured; they are the wall's, with as many runs side by side as the comparison had. Between two measurements
accuracy is taken as linear; a cell is empty where a seed was at its end before.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from itertools import pairwise
from pathlib import Path

from lab.benchmarks.runs import mean_interval

COLUMNS = ("variant", "rate", "seed", "step", "completions", "seconds", "accuracy")
Point = dict[str, float]
Curves = dict[tuple[str, str], dict[int, list[Point]]]
"""What was measured along each run, by variant and rate, then by seed."""


def read_runs(folder: Path) -> Curves:
    """The finished runs of a comparison's folder."""
    found: Curves = {}
    for file in sorted(folder.glob("runs/*/lr_*/seed_*/metrics.jsonl")):
        variant, rate, seed = file.parts[-4:-1]
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        config = config_of(file.with_name("config.yaml"))
        if not rows or rows[-1]["step"] < int(config["steps"]):
            continue
        times = [row["step_time"] for row in rows if row["step"] and "eval/accuracy" not in row]
        a_step = statistics.mean(times) if times else 0.0
        completions = int(config["prompts_per_step"]) * int(config["num_generations"])
        points = [
            {
                "step": row["step"], "completions": row["step"] * completions, "seconds": row["step"] * a_step,
                "accuracy": row["eval/accuracy"],
            }
            for row in rows
            if row.get("eval/accuracy") is not None
        ]  # fmt: skip
        found.setdefault((variant, rate.removeprefix("lr_")), {})[int(seed.removeprefix("seed_"))] = points
    return found


def config_of(file: Path) -> dict[str, str]:
    """The settings of one line each."""
    return dict(line.split(": ", 1) for line in file.read_text().splitlines() if ": " in line)


def write_csv(path: Path, curves: Curves) -> None:
    """A line a measurement."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for (variant, rate), by_seed in curves.items():
            for seed, points in sorted(by_seed.items()):
                for point in points:
                    step, completions = int(point["step"]), int(point["completions"])
                    numbers = f"{point['seconds']:.1f}", f"{point['accuracy']:.4f}"
                    writer.writerow([variant, rate, seed, step, completions, *numbers])


def read_csv(path: Path) -> Curves:
    """What `write_csv` has written."""
    found: Curves = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            point = {name: float(row[name]) for name in COLUMNS[3:]}
            found.setdefault((row["variant"], row["rate"]), {}).setdefault(int(row["seed"]), []).append(point)
    return found


def accuracy_at(points: list[Point], clock: str, mark: float) -> float | None:
    """Accuracy when the clock read so much; None after the run's end."""
    for before, after in pairwise(points):
        if before[clock] <= mark <= after[clock]:
            share = (mark - before[clock]) / (after[clock] - before[clock])
            return before["accuracy"] + share * (after["accuracy"] - before["accuracy"])
    return None


def table(curves: Curves, clock: str, marks: list[float]) -> str:
    """A line a variant and rate, a column a mark."""
    lines = [
        "| | rate | seeds | " + " | ".join(f"{mark:g}" for mark in marks) + " |",
        "|" + "---|" * (3 + len(marks)),
    ]
    for (variant, rate), by_seed in curves.items():
        cells = []
        for mark in marks:
            values = [accuracy_at(points, clock, mark) for points in by_seed.values()]
            known = [value for value in values if value is not None]
            cells.append(mean_interval(known) if len(known) == len(values) else "")
        lines.append(f"| {variant} | {rate} | {len(by_seed)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="what `oblrpo compare` left")
    parser.add_argument("--csv", type=Path, required=True, help="where the measurements are kept")
    parser.add_argument("--seconds", nargs="+", type=float, default=[120, 240, 360, 480])
    arguments = parser.parse_args()
    if arguments.folder:
        write_csv(arguments.csv, read_runs(arguments.folder))
    curves = read_csv(arguments.csv)
    marks = sorted({point["completions"] for runs in curves.values() for points in runs.values() for point in points})
    print("accuracy after completions\n\n" + table(curves, "completions", marks))
    print("\naccuracy after seconds of training\n\n" + table(curves, "seconds", arguments.seconds))


if __name__ == "__main__":
    main()
