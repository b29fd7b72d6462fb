"""What rates the demo survives: fixed, plug-in and debiased schedules, side by side.

    python -m benchmarks.learning_rates --folder runs/learning_rates [--seeds 3] [--steps 100]

For each seed the demo's policy is warm-started once; every run goes on from there. The table gives held-out accuracy
after the last step as mean over seeds with a 95 % interval (Student's t over seeds), and the lowest seed. Finished
runs are not repeated, so the command can be interrupted and called again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.runs import mean_interval, rows, run_all, task_settings, warm_starts, write_csv

# baseline, schedule -> rates
GRID = {
    ("rloo", "off"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("oblr", "off"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("oblr", "plugin"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("oblr", "debiased"): (3e-4, 1e-3, 3e-3, 1e-2),
}


def accuracies(metrics: list[dict]) -> list[float]:
    return [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path, help="write every run's accuracies here")
    arguments = parser.parse_args()
    starts = warm_starts(arguments.folder, ["path"], arguments.seeds, arguments.processes)
    runs = {}
    for seed in range(arguments.seeds):
        for (baseline, schedule), rates in GRID.items():
            for rate in rates:
                settings = [
                    "--model", starts["path", seed], *task_settings("path"), "--seed", seed, "--eval-steps", 20,
                    "--baseline", baseline, "--schedule", schedule, "--learning-rate", rate, "--save-steps", 20,
                ]  # fmt: skip
                output = arguments.folder / f"{baseline}_{schedule}_{rate:g}_{seed}"
                runs[baseline, schedule, rate, seed] = (output, settings)
    run_all(runs, arguments.steps, arguments.processes)
    report(arguments, {key: accuracies(rows(output, arguments.steps)) for key, (output, _) in runs.items()})
    if arguments.csv:
        header = ["baseline", "schedule", "eta_0", "seed", "accuracies from before to after"]
        curve = lambda metrics: [" ".join(f"{value:.4f}" for value in accuracies(metrics))]  # noqa: E731
        write_csv(arguments.csv, header, runs, arguments.steps, curve)


def report(arguments: argparse.Namespace, results: dict[tuple[str, str, float, int], list[float]]) -> None:
    print("\n| baseline | schedule | eta_0 | before | after | lowest seed |\n|---|---|---|---|---|---|")
    for (baseline, schedule), rates in GRID.items():
        for rate in rates:
            curves = [results[baseline, schedule, rate, seed] for seed in range(arguments.seeds)]
            before, after = [curve[0] for curve in curves], [curve[-1] for curve in curves]
            print(
                f"| {baseline} | {schedule} | {rate:g} | {statistics.mean(before):.3f} | {mean_interval(after)} | "
                f"{min(after):.3f} |"
            )


if __name__ == "__main__":
    main()
