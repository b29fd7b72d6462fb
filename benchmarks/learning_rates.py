"""A grid of fixed and debiased learning rates, and `auto`, which has none to set, from three starts.

    python -m benchmarks.learning_rates --folder runs/learning_rates [--tasks path ...] [--seeds 5] [--tuning-seeds 2]

Each task's policy is warm-started once a seed; every run goes on from there with AdamW, 64 prompts of 4 completions.
The grid is run on the first seeds; each schedule's best rate of them, and `auto` from all starts, on all seeds. Prints
held-out accuracy after the last step, and `auto` against the best fixed rate, seed by seed. Finished runs are not
repeated: the command can be interrupted and called again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.runs import mean_interval, rows, run_all, task_settings, warm_starts, write_csv

GRID = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3)
STARTS = (1e-7, 1e-5, 1e-3)
Key = tuple[str, str, float, int]


class Runs:
    """Where every run lies, how it is made, and what came of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.policies = warm_starts(arguments.folder, arguments.tasks, arguments.seeds, arguments.processes)

    def of(self, key: Key) -> tuple[Path, list]:
        """Folder and settings."""
        task, schedule, rate, seed = key
        return self.arguments.folder / f"{task}_{schedule}_{rate:g}_{seed}", [
            "--model", self.policies[task, seed], *task_settings(task), "--seed", seed, "--prompts-per-step", 64,
            "--num-generations", 4, "--baseline", self.arguments.baseline, "--schedule", schedule, "--learning-rate",
            rate, "--eval-steps", 0, "--eval-prompts", 512, "--save-steps", 40, "--ledger", "off",
            "--calibration-steps", 0,
        ]  # fmt: skip

    def make(self, keys: list[Key]) -> None:
        """Those that are not there yet."""
        run_all({key: self.of(key) for key in keys}, self.arguments.steps, self.arguments.processes)

    def metrics(self, key: Key) -> list[dict] | None:
        return rows(self.of(key)[0], self.arguments.steps)

    def after(self, task: str, schedule: str, rate: float) -> dict[int, float]:
        """Accuracy after the last step, by seed."""
        found = {seed: self.metrics((task, schedule, rate, seed)) for seed in range(self.arguments.seeds)}
        return {seed: metrics[-1]["eval/accuracy"] for seed, metrics in found.items() if metrics}

    def best(self, task: str, schedule: str) -> float:
        """The grid's rate with the highest mean over the tuning seeds."""
        tuned = {rate: self.after(task, schedule, rate) for rate in GRID}
        seeds = range(self.arguments.tuning_seeds)
        means = {
            rate: statistics.mean(after[seed] for seed in seeds)
            for rate, after in tuned.items()
            if all(seed in after for seed in seeds)
        }
        return max(means, key=means.__getitem__)


def report(runs: Runs) -> None:
    for task in runs.arguments.tasks:
        print(f"\n{task}\n\n| schedule | rate | after | lowest seed | seeds |\n|---|---|---|---|---|")
        for schedule, rates in (("off", GRID), ("debiased", GRID), ("auto", STARTS)):
            for rate in rates:
                after = list(runs.after(task, schedule, rate).values())
                if after:
                    print(f"| {schedule} | {rate:g} | {mean_interval(after)} | {min(after):.3f} | {len(after)} |")
        rate = runs.best(task, "off")
        fixed = runs.after(task, "off", rate)
        for start in STARTS:
            auto = runs.after(task, "auto", start)
            both = fixed.keys() & auto.keys()
            if both:
                share = statistics.mean(auto[s] for s in both) / statistics.mean(fixed[s] for s in both)
                gain = mean_interval([auto[s] - fixed[s] for s in both])
                print(
                    f"\nauto from {start:g}: {share:.3f} of the best fixed rate's ({rate:g}), difference {gain}", end=""
                )
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_rates"))
    parser.add_argument("--tasks", nargs="+", default=["path", "addition", "countdown"])
    parser.add_argument("--schedules", nargs="+", choices=("off", "debiased"), default=["off", "debiased"])
    parser.add_argument("--baseline", default="oblr_shrunk")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what is there")
    arguments = parser.parse_args()
    runs, seeds, tuning = Runs(arguments), range(arguments.seeds), range(arguments.tuning_seeds)
    tasks, schedules = arguments.tasks, arguments.schedules
    if not arguments.only_report:
        runs.make([(task, "auto", start, seed) for seed in seeds for task in tasks for start in STARTS])
        runs.make([(t, schedule, rate, s) for schedule in schedules for s in tuning for t in tasks for rate in GRID])
        runs.make([(t, schedule, runs.best(t, schedule), s) for schedule in schedules for s in seeds for t in tasks])
    report(runs)
    if arguments.csv:
        rates = (("off", GRID), ("debiased", GRID), ("auto", STARTS))
        keys = [(task, name, rate, s) for task in tasks for name, grid in rates for rate in grid for s in seeds]
        write_csv(
            arguments.csv, ["task", "schedule", "rate", "seed", "accuracy before", "after"],
            {key: runs.of(key) for key in keys}, arguments.steps,
            lambda m: [f"{m[0]['eval/accuracy']:.4f}", f"{m[-1]['eval/accuracy']:.4f}"],
        )  # fmt: skip


if __name__ == "__main__":
    main()
