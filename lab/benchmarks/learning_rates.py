"""A grid of learning rates, held, or braked by the signal-to-noise ratio; and `auto`, which has none to set.

    python -m lab.benchmarks.learning_rates --folder runs/learning_rates [--tasks path ...] [--seeds 5] \\
        [--tuning-seeds 2]
    python -m lab.benchmarks.learning_rates --optimizer SGD --rates ... --starts ... --folder runs/learning_rates_sgd

Each task's policy is warm-started once a seed; every run goes on from there with 64 prompts of 4 completions a step.
The grid is run on the first seeds; each schedule's best rate of them, and `auto` from all starts, on all seeds. Prints
held-out accuracy after the last step, each schedule's window of usable rates, and `auto` against each at its best, seed
by seed. Finished runs are not repeated: the command can be interrupted and called again. Tables are drawn from a CSV,
with --only-report from it alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from lab.benchmarks.runs import Results, after_start, mean_interval, run_all, warm_starts
from oblrpo.compare.statistics import usable

GRID = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3)
STARTS = (1e-7, 1e-5, 1e-3)
SCHEDULES = ("off", "plugin", "debiased", "auto")
USABLE = 0.9
"""Share of its best accuracy that a schedule keeps within its window."""
Key = tuple[str, str, float, int]


class Grid:
    """The runs, and what came of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        numbers = {
            "accuracy before": lambda metrics: metrics[0]["eval/accuracy"],
            "after": lambda metrics: metrics[-1]["eval/accuracy"],
        }
        file = arguments.csv or arguments.folder / "runs.csv"
        self.results = Results(file, ["task", "schedule", "rate", "seed"], numbers)

    def make(self, keys: list[Key]) -> None:
        """The runs that are not there yet."""
        told = self.arguments
        policies = warm_starts(told.folder, told.tasks, told.seeds, told.processes)
        runs = {
            (task, schedule, rate, seed): (
                told.folder / f"{task}_{schedule}_{rate:g}_{seed}",
                after_start(task, policies[task, seed]) | {
                    "seed": seed, "prompts_per_step": 64, "num_generations": 4, "baseline": told.baseline,
                    "schedule": schedule, "learning_rate": rate, "optimizer": told.optimizer,
                    "eval_steps": 0, "eval_prompts": 512, "save_steps": 40, "ledger_steps": 0, "calibration_steps": 0,
                },
            )
            for task, schedule, rate, seed in keys
        }  # fmt: skip
        run_all(runs, told.steps, told.processes, self.results)

    def after(self, task: str, schedule: str, rate: float) -> dict[int, float]:
        """Accuracy after the last step, by seed."""
        return self.results.by_seed(task, schedule, rate, number="after", seeds=self.arguments.seeds)

    def tuned(self, task: str, schedule: str) -> dict[float, float]:
        """Mean accuracy over the tuning seeds, at every rate that has them all."""
        seeds = range(self.arguments.tuning_seeds)
        found = {rate: self.after(task, schedule, rate) for rate in self.arguments.rates}
        return {rate: statistics.mean(after[s] for s in seeds) for rate, after in found.items() if {*seeds} <= {*after}}

    def best(self, task: str, schedule: str) -> float:
        """The rate that the tuning seeds choose, of equally good ones the lowest."""
        means = self.tuned(task, schedule)
        return max(means, key=lambda rate: (round(means[rate], 6), -rate))


def report(grid: Grid) -> None:
    told = grid.arguments
    for task in told.tasks:
        print(f"\n{task}\n\n| schedule | rate | after | lowest seed | seeds |\n|---|---|---|---|---|")
        for schedule in told.schedules:
            for rate in told.starts if schedule == "auto" else told.rates:
                if after := list(grid.after(task, schedule, rate).values()):
                    print(f"| {schedule} | {rate:g} | {mean_interval(after)} | {min(after):.3f} | {len(after)} |")
        for schedule in told.schedules:
            if schedule != "auto" and (means := grid.tuned(task, schedule)):
                report_window(schedule, means)
                report_auto(grid, task, schedule)


def report_window(schedule: str, means: dict[float, float]) -> None:
    """The rates around the best that keep nine tenths of its accuracy."""
    window = usable(list(means), list(means.values()), USABLE)
    low = f"{'at most ' * window.open_low}{window.low:.2g}"
    high = f"{'at least ' * window.open_high}{window.high:.2g}"
    print(f"\n{schedule}: usable from {low} to {high}, a factor of {window.high / window.low:.1f}")


def report_auto(grid: Grid, task: str, schedule: str) -> None:
    """`auto` from each start against a schedule at its best rate, seed by seed."""
    rate = grid.best(task, schedule)
    tuned = grid.after(task, schedule, rate)
    for start in grid.arguments.starts:
        auto = grid.after(task, "auto", start)
        if both := tuned.keys() & auto.keys():
            share = statistics.mean(auto[s] for s in both) / statistics.mean(tuned[s] for s in both)
            gain = mean_interval([auto[s] - tuned[s] for s in both])
            print(f"auto from {start:g} over its best, {rate:g}: {share:.3f}, difference {gain}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_rates"))
    parser.add_argument("--tasks", nargs="+", default=["path", "addition", "countdown"])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--rates", nargs="+", type=float, default=GRID)
    parser.add_argument("--starts", nargs="+", type=float, default=STARTS, help="of `auto`")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--baseline", default="oblr_shrunk")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what the CSV has")
    arguments = parser.parse_args()
    grid, seeds, tuning = Grid(arguments), range(arguments.seeds), range(arguments.tuning_seeds)
    tasks, searched = arguments.tasks, [name for name in arguments.schedules if name != "auto"]
    if not arguments.only_report:
        if "auto" in arguments.schedules:
            grid.make([(task, "auto", start, seed) for seed in seeds for task in tasks for start in arguments.starts])
        grid.make([(t, name, rate, s) for name in searched for s in tuning for t in tasks for rate in arguments.rates])
        grid.make([(t, name, grid.best(t, name), s) for name in searched for s in seeds for t in tasks])
    report(grid)


if __name__ == "__main__":
    main()
