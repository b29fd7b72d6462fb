"""How prompts are drawn from data that are met again: in epochs, by dynamic sampling.

    python -m lab.benchmarks.prompt_sampling [--folder runs/prompts] [--csv docs/results/prompt_sampling.csv] \\
        [--seeds 3]

Routes of the task path as rows of data (--problems of them, each met about --steps x 32 / --problems times), from the
demo's warm start, 32 x 4 completions a step. The clock is that of `lab.benchmarks.trl_run`; completions are all that
were sampled, those that dynamic sampling drops, too. Noise is the mean of `trace_cov` over the mean of `signal2`, of
the whole run. Finished runs are not repeated, and --only-report prints what the CSV holds.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

import oblrpo
from lab.benchmarks.against_trl import table
from lab.benchmarks.runs import mean_interval, warm_starts
from lab.benchmarks.trl_run import Clock, watched_by
from oblrpo.tasks import Problem
from oblrpo.tasks.path import PathTask

PROMPTS, GENERATIONS = 32, 4
HELD_OUT = 256
VARIANTS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "dynamic": {"dynamic_sampling": 8},
}
ALGORITHMS: dict[str, dict[str, Any]] = {"rloo": {"learning_rate": 4e-4}, "oblrpo_shrunk": {"learning_rate": 3e-4}}
COLUMNS = ("algorithm", "variant", "seed", "step", "completions", "cpu_seconds", "accuracy", "reward", "noise")
Rows = list[dict[str, str]]


def problems(count: int, heldout: bool) -> list[dict[str, str]]:
    """Different routes as rows of data; those for training do not depend on the seed of the run."""
    task, rng = PathTask(), random.Random("prompts")
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        problem = task.draw(rng)
        if task.is_heldout(problem) == heldout:
            found[problem.text] = {"prompt": problem.text, "answer": problem.answer}
    return list(found.values())


def route(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The task's own reward."""
    asked = [Problem(*each) for each in zip(prompts, answer, strict=True)]
    return PathTask().rewards(asked, completions)


def train(arguments: argparse.Namespace, algorithm: str, variant: str, seed: int, start: Path) -> Rows:
    """One run in this process, as rows of the CSV."""
    clock = Clock(PROMPTS * GENERATIONS)
    with watched_by(clock):
        run = oblrpo.train(
            model=str(start), data=problems(arguments.problems, False), eval_data=problems(HELD_OUT, True),
            reward=route, algorithm=algorithm, seed=seed, steps=arguments.steps, eval_steps=arguments.every,
            eval_prompts=HELD_OUT,
            prompts_per_step=PROMPTS, num_generations=GENERATIONS, max_completion_length=12, ledger_steps=0,
            save_steps=0, threads=1, output=str(arguments.folder / f"{algorithm}_{variant}_{seed}"), progress=False,
            **ALGORITHMS[algorithm], **VARIANTS[variant],
        )  # fmt: skip
    steps = [row for row in run.metrics if row["step"]]
    sampled = [0, *accumulate(PROMPTS * GENERATIONS * row.get("num_gen_batches", 1) for row in steps)]
    known = [row for row in steps if row["signal2"] is not None]
    noise = sum(row["trace_cov"] for row in known) / PROMPTS / sum(row["signal2"] for row in known)
    reward = statistics.mean(row["reward"] for row in steps[-20:])
    return [
        {"algorithm": algorithm, "variant": variant, "seed": str(seed), "step": str(row["step"]),
         "completions": str(sampled[int(row["step"])]), "cpu_seconds": f"{row['cpu_seconds']:.3f}",
         "accuracy": f"{row['accuracy']:.4f}", "reward": f"{reward:.4f}", "noise": f"{noise:.3f}"}
        for row in clock.rows
    ]  # fmt: skip


def at(rows: Rows, key: str, place: float) -> float | None:
    """Held-out accuracy where a column reads so much, linear between measurements; None after the run's end."""
    points = [(float(row[key]), float(row["accuracy"])) for row in rows]
    for (before, low), (after, high) in pairwise(points):
        if before <= place <= after:
            return low + (high - low) * (place - before) / (after - before)
    return None


def report(kept: Rows) -> str:
    """A line for each algorithm and way of drawing, means over seeds; and the differences from epochs, seed by seed."""
    runs: dict[tuple[str, str, str], Rows] = {}
    for row in kept:
        runs.setdefault((row["algorithm"], row["variant"], row["seed"]), []).append(row)
    lines = []
    for algorithm in dict.fromkeys(row["algorithm"] for row in kept):
        of = {key: rows for key, rows in runs.items() if key[0] == algorithm}
        completions = min(float(rows[-1]["completions"]) for rows in of.values())
        seconds = min(float(rows[-1]["cpu_seconds"]) for rows in of.values())
        for variant in dict.fromkeys(name for _, name, _ in of):
            mine = [rows for (_, name, _), rows in of.items() if name == variant]
            others = [of[algorithm, "epochs", rows[0]["seed"]] for rows in mine]
            ends = [float(rows[-1]["accuracy"]) for rows in mine]
            cells = [algorithm, variant, mean_interval(ends)]
            for key, place in (("completions", completions), ("cpu_seconds", seconds)):
                pairs = [
                    (at(rows, key, place), at(other, key, place)) for rows, other in zip(mine, others, strict=True)
                ]
                cells.append(mean_interval([value for value, _ in pairs if value is not None]))
                cells.append(mean_interval([a - b for a, b in pairs if a is not None and b is not None]))
            for key in ("completions", "cpu_seconds"):
                cells.append(mean_interval([float(rows[-1][key]) / float(rows[-1]["step"]) for rows in mine]))
            lines.append([*cells, mean_interval([float(rows[0]["noise"]) for rows in mine])])
    titles = ["", "prompts", "accuracy at the end", "after equally many completions", "less epochs'"]
    titles += ["after equal CPU seconds", "less epochs'", "completions a step", "CPU s a step", "noise over signal"]
    return table(titles, lines)


def read(path: Path) -> Rows:
    """The rows of a CSV; none if it is not there."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/prompts"))
    parser.add_argument("--csv", type=Path, help="that of the folder if none is given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--problems", type=int, default=384)
    parser.add_argument("--every", type=int, default=10, help="steps between measurements of held-out accuracy")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--only-report", action="store_true")
    arguments = parser.parse_args()
    file = arguments.csv or arguments.folder / "prompt_sampling.csv"
    kept = read(file)
    torch.set_num_threads(1)
    if not arguments.only_report:
        starts = warm_starts(arguments.folder, ["path"], arguments.seeds, 1)
        wanted = [(a, v, s) for a in arguments.algorithms for s in range(arguments.seeds) for v in VARIANTS]
        done = {(row["algorithm"], row["variant"], row["seed"]) for row in kept}
        for algorithm, variant, seed in wanted:
            if (algorithm, variant, str(seed)) in done:
                continue
            kept += train(arguments, algorithm, variant, seed, starts["path", seed])
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w", newline="") as out:
                writer = csv.DictWriter(out, COLUMNS)
                writer.writeheader()
                writer.writerows(kept)
            print(algorithm, variant, seed, kept[-1]["accuracy"], kept[-1]["cpu_seconds"], flush=True)
    print("\nMeans over seeds with 95 % intervals (Student's t).\n")
    print(report(kept))


if __name__ == "__main__":
    main()
