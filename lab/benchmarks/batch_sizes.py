"""Learning rates found against rates tuned, from the smallest batches to the largest, at one number of completions.

    python -m lab.benchmarks.batch_sizes --folder runs/batch_sizes --tasks path --rules auto off:1e-3 kl:0.02 \\
        [--seeds 5]
    python -m lab.benchmarks.batch_sizes --csv docs/results/batch_sizes.csv --only-report [--completions 30720]

A rule is `auto`, or another schedule without a number (`auto@1e-3` starts there and not at `--start`); a schedule with
its rate (`off:1e-3`); or `kl:0.02`, `auto:0.05`: a schedule that starts at `--start`, with its target in nats
(`schedule_kl`). All begin, seed by seed, with the same
warm-started policy, take prompts of 4 completions each and the shrunk baseline, and end after the same number of
completions. Prints held-out accuracy after the last step, and each rule's over that of the best fixed rate of its
point. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

from lab.benchmarks.runs import Results, after_start, mean_interval, run_all, warm_starts

GENERATIONS = 4
TARGETED = ("kl", "auto")
"""Schedules whose number is a target in nats."""
Key = tuple[str, str, int, int, str, int]


def settings_of(rule: str, start: float) -> dict[str, Any]:
    """The settings of a rule that is written as `name`, `name@start` or `name:number`."""
    name, _, number = rule.partition(":")
    name, _, other = name.partition("@")
    found: dict[str, Any] = {"schedule": name, "learning_rate": float(other or start)}
    if number:
        found["schedule_kl" if name in TARGETED else "learning_rate"] = float(number)
    return found


class Points:
    """The runs, and what came of them."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.told = told
        numbers = {
            "before": lambda metrics: metrics[0]["eval/accuracy"],
            "after": lambda metrics: metrics[-1]["eval/accuracy"],
        }
        file = told.csv or told.folder / "runs.csv"
        self.results = Results(file, ["task", "optimizer", "completions", "prompts", "rule", "seed"], numbers)

    def make(self) -> None:
        """The runs that are not there yet."""
        told = self.told
        policies = warm_starts(told.folder, told.tasks, told.seeds, told.processes)
        momentum = {"momentum": told.momentum} if told.momentum else {}
        for P in told.prompts:
            runs = {}
            for seed, task, rule in itertools.product(range(told.seeds), told.tasks, told.rules):
                key: Key = task, told.optimizer, told.completions, P, rule, seed
                if not self.results.of(*key):
                    folder = told.folder / "_".join(map(str, key)).replace(":", "-")
                    runs[key] = folder, after_start(task, policies[task, seed]) | settings_of(rule, told.start) | {
                        "seed": seed, "prompts_per_step": P, "num_generations": GENERATIONS, "baseline": "oblr_shrunk",
                        "optimizer": told.optimizer, "optimizer_args": momentum, "eval_steps": 0, "eval_prompts": 512,
                        "save_steps": 200, "ledger_steps": 0, "calibration_steps": 0,
                    }  # fmt: skip
            run_all(runs, max(1, round(told.completions / (P * GENERATIONS))), told.processes, self.results)

    def after(self, task: str, P: int, rule: str) -> dict[int, float]:
        """Accuracy after the last step, by seed."""
        key = task, self.told.optimizer, self.told.completions, P, rule
        return self.results.by_seed(*key, number="after", seeds=self.told.seeds)


def report(points: Points) -> None:
    """A table a task: accuracy after the last step, and over the best fixed rate of the point."""
    told = points.told
    for task in told.tasks:
        print(f"\n{task}\n\n| rule | " + " | ".join(f"{P} prompts" for P in told.prompts) + " |")
        print("|" + "---|" * (1 + len(told.prompts)))
        for rule in told.rules:
            cells = [mean_interval(list(points.after(task, P, rule).values())) for P in told.prompts]
            print(f"| {rule} | " + " | ".join(cells) + " |")
        for rule in told.rules:
            shares = [_over_best(points, task, P, rule) for P in told.prompts]
            print(f"| {rule} over the best fixed rate | " + " | ".join(shares) + " |")


def _over_best(points: Points, task: str, P: int, rule: str) -> str:
    fixed = [list(points.after(task, P, other).values()) for other in points.told.rules if other.startswith("off:")]
    mine = list(points.after(task, P, rule).values())
    best = max((statistics.mean(values) for values in fixed if values), default=0.0)
    return f"{statistics.mean(mine) / best:.3f}" if mine and best else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/batch_sizes"))
    parser.add_argument("--tasks", nargs="+", default=["path"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--rules", nargs="+", default=["auto"])
    parser.add_argument("--start", type=float, default=1e-5, help="learning rate at which rules without one begin")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; 0: none")
    parser.add_argument("--completions", type=int, default=15360)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what the CSV has")
    arguments = parser.parse_args()
    points = Points(arguments)
    if not arguments.only_report:
        points.make()
    report(points)


if __name__ == "__main__":
    main()
