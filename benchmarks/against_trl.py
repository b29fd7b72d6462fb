"""Side by side with TRL's GRPOTrainer and RLOOTrainer: held-out accuracy against samples and seconds, steps a second.

    python -m benchmarks.against_trl --folder runs/against_trl [--seeds 5] [--steps 60] [--contenders trl-grpo grpo ...]

needs TRL (`pip install 'trl>=1.16,<1.17'`). One warm-started policy a seed; from it every contender trains on
the same prompts, one process at a time, on one thread (`benchmarks.trl_run` says how, and what the clock counts). The
contenders take turns within a seed, each seed beginning with another, so that other work on the machine hits all alike.
TRL draws its own completions; with --same-draws it is seeded as ours, and the same algorithm has the same curve.
Finished runs are not repeated: the command can be interrupted and called again. A CSV is
kept, from which --only-report takes the runs that are not there.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from benchmarks.runs import mean_interval, warm_starts
from benchmarks.trl_run import OURS, TRL

COLUMNS = ("contender", "seed", "step", "samples", "seconds", "cpu_seconds", "accuracy")
Rows = list[dict[str, float]]
Found = dict[tuple[str, int], Rows]
"""What the clock and the evaluations of each finished run read, step 0 first."""


def finished(arguments: argparse.Namespace) -> Found:
    """The runs that are there, with as many steps."""
    found: Found = {}
    for seed in range(arguments.seeds):
        for contender in arguments.contenders:
            file = arguments.folder / f"{contender}_{seed}" / "clock.json"
            rows = json.loads(file.read_text()) if file.is_file() else []
            if rows and rows[-1]["step"] == arguments.steps:
                found[contender, seed] = rows
    return found


def run_missing(arguments: argparse.Namespace) -> None:
    """One at a time; what an interrupted run left is thrown away, because its clock is lost."""
    starts = warm_starts(arguments.folder, ["path"], arguments.seeds, 1)
    for seed in range(arguments.seeds):
        turn = seed % len(arguments.contenders)
        for contender in arguments.contenders[turn:] + arguments.contenders[:turn]:
            if (contender, seed) in finished(arguments):
                continue
            folder = arguments.folder / f"{contender}_{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            settings = {"seed": seed, "steps": arguments.steps, "every": arguments.every}
            settings["eval-prompts"] = arguments.eval_prompts
            words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
            words += ["--same-draws"] if arguments.same_draws else []
            with folder.with_suffix(".log").open("w") as log:
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.trl_run", contender, starts["path", seed], folder, *words],
                    stdout=log, stderr=log, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            print(contender, seed, *(f"{row['accuracy']:.3f}" for row in finished(arguments)[contender, seed]))
            write_csv(arguments.csv, read_csv(arguments.csv) | finished(arguments))


def write_csv(path: Path, found: Found) -> None:
    """A line an evaluated step."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for (contender, seed), rows in found.items():
            writer.writerows({"contender": contender, "seed": seed} | row for row in rows)


def read_csv(path: Path) -> Found:
    """What `write_csv` has written, with this or other settings; nothing if it has not."""
    found: Found = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                numbers = {name: (int if name in {"step", "samples"} else float)(row[name]) for name in COLUMNS[2:]}
                found.setdefault((row["contender"], int(row["seed"])), []).append(numbers)
    return found


def of(found: Found, contender: str) -> dict[int, Rows]:
    """A contender's runs by seed."""
    return {seed: rows for (name, seed), rows in found.items() if name == contender}


def per_step(rows: Rows, clock: str) -> float:
    """Seconds a step, over the whole run."""
    return rows[-1][clock] / rows[-1]["step"]


def ratio(found: Found, contender: str, rival: str, clock: str) -> str:
    """How many steps a contender does in a rival's time, seed by seed."""
    mine, others = of(found, contender), of(found, rival)
    both = sorted(mine.keys() & others.keys())
    return mean_interval([per_step(others[seed], clock) / per_step(mine[seed], clock) for seed in both])


def accuracy_at(rows: Rows, seconds: float) -> float | None:
    """Held-out accuracy when the clock read so much, linear between evaluations; None after the run's end."""
    for before, after in pairwise(rows):
        if before["seconds"] <= seconds <= after["seconds"]:
            share = (seconds - before["seconds"]) / (after["seconds"] - before["seconds"])
            return before["accuracy"] + share * (after["accuracy"] - before["accuracy"])
    return None


def table(titles: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *lines])


def report(found: Found, contenders: list[str], marks: list[float]) -> str:
    """Three tables: throughput, accuracy after samples, accuracy after seconds."""
    there = [name for name in contenders if of(found, name)]
    rivals = [name for name in TRL if name in there]
    titles = ["", "steps a second", *(f"over {rival}'s" for rival in rivals)]
    titles += ["CPU s a step", *(f"{rival}'s over it" for rival in rivals)]
    speed, learnt, timed = [], [], []
    steps = sorted({int(row["step"]) for rows in found.values() for row in rows})
    samples = {int(row["step"]): int(row["samples"]) for rows in found.values() for row in rows}
    for name in there:
        runs = list(of(found, name).values())
        speed.append([name, mean_interval([1 / per_step(rows, "seconds") for rows in runs])])
        speed[-1] += [ratio(found, name, rival, "seconds") for rival in rivals]
        speed[-1].append(f"{statistics.mean(per_step(rows, 'cpu_seconds') for rows in runs):.3f}")
        speed[-1] += [ratio(found, name, rival, "cpu_seconds") for rival in rivals]
        by_step = [[row["accuracy"] for rows in runs for row in rows if row["step"] == step] for step in steps]
        learnt.append([name, *map(mean_interval, by_step)])
        at = [[accuracy_at(rows, mark) for rows in runs] for mark in marks]
        known = [[value for value in values if value is not None] for values in at]
        whole = [values if len(values) == len(runs) else [] for values in known]  # blank: some seed's run was over
        timed.append([name, *map(mean_interval, whole), f"{statistics.mean(rows[-1]['seconds'] for rows in runs):.0f}"])
    tables = [
        table(titles, speed),
        table(["accuracy after samples", *(f"{samples[step]}" for step in steps)], learnt),
        table(["accuracy after seconds", *(f"{mark:g}" for mark in marks), "all steps take"], timed),
    ]
    return "\n\n".join(tables)


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/against_trl"))
    parser.add_argument("--contenders", nargs="+", choices=[*TRL, *OURS], default=[*TRL, *OURS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between measurements of held-out accuracy")
    parser.add_argument("--eval-prompts", type=int, default=512)
    parser.add_argument("--seconds", nargs="+", type=float, default=[15, 30, 45, 60], help="marks of the last table")
    parser.add_argument("--same-draws", action="store_true", help="TRL samples with the random numbers of ours")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what is there or in the CSV")
    arguments = parser.parse_args()
    arguments.csv = arguments.csv or arguments.folder / "runs.csv"
    if not arguments.only_report:
        if not _is_there("trl") and {*TRL} & {*arguments.contenders}:
            print("TRL is not installed; install it with: pip install 'trl>=1.16,<1.17'", file=sys.stderr)
            raise SystemExit(2)
        run_missing(arguments)
    found = read_csv(arguments.csv) | finished(arguments) if arguments.only_report else finished(arguments)
    there = [name for name in ("trl", "transformers", "torch") if _is_there(name)]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in there) + ", one thread a process.")
    print("Means over seeds with 95 % intervals (Student's t). Seconds are the wall's, which other work on the machine")
    print("lengthens; CPU time is the process's own.\n")
    print(report(found, arguments.contenders, arguments.seconds))


if __name__ == "__main__":
    main()
