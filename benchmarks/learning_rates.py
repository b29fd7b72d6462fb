"""What rates the demo survives: fixed, plug-in and debiased schedules, side by side.

    python benchmarks/learning_rates.py --folder runs/learning_rates [--seeds 3] [--steps 100]

For each seed the demo's policy is warm-started once; every run goes on from there. The table gives held-out accuracy
after the last step as mean over seeds with a 95 % interval (Student's t over seeds), and the lowest seed. Finished
runs are not repeated, so the command can be interrupted and called again.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# baseline, schedule -> rates
GRID = {
    ("rloo", "off"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("oblr", "off"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("oblr", "plugin"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("oblr", "debiased"): (3e-4, 1e-3, 3e-3, 1e-2),
}
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # 97.5 %, by number of seeds


def train(output: Path, *settings: object) -> None:
    """One run in a process of its own, or what is left of it."""
    resume = ["--resume"] if (output / "config.yaml").is_file() else []
    command = [sys.executable, "-c", "from oblrpo.cli import main; main()", "train", "demo", "--output", str(output)]
    with (output.parent / f"{output.name}.log").open("a") as log:
        subprocess.run([*command, *map(str, settings), *resume], stdout=log, stderr=log, check=True)


def finished(output: Path, steps: int) -> list[float] | None:
    """Held-out accuracies of a finished run."""
    file = output / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if not rows or rows[-1]["step"] < steps:
        return None
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path, help="write every run's accuracies here")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.processes) as pool:
        starts = {seed: arguments.folder / f"warm_{seed}" for seed in range(arguments.seeds)}
        todo = [(out, seed) for seed, out in starts.items() if finished(out, 0) is None]
        list(pool.map(lambda job: train(job[0], "--steps", 0, "--seed", job[1]), todo))
        runs = {
            (baseline, schedule, rate, seed): arguments.folder / f"{baseline}_{schedule}_{rate:g}_{seed}"
            for seed in starts
            for (baseline, schedule), rates in GRID.items()
            for rate in rates
        }

        def one(key: tuple[str, str, float, int]) -> None:
            baseline, schedule, rate, seed = key
            if finished(runs[key], arguments.steps) is None:
                train(
                    runs[key], "--model", starts[seed] / "checkpoints" / "step_0", "--warm-start-steps", 0,
                    "--baseline", baseline, "--schedule", schedule, "--learning-rate", rate, "--seed", seed,
                    "--steps", arguments.steps, "--eval-steps", 20, "--save-steps", 20,
                )  # fmt: skip
                print(*key, finished(runs[key], arguments.steps), flush=True)

        list(pool.map(one, runs))
    report(arguments, {key: finished(output, arguments.steps) for key, output in runs.items()})


def report(arguments: argparse.Namespace, results: dict[tuple[str, str, float, int], list[float] | None]) -> None:
    print("\n| baseline | schedule | eta_0 | before | after | lowest seed |\n|---|---|---|---|---|---|")
    for (baseline, schedule), rates in GRID.items():
        for rate in rates:
            curves = [results[baseline, schedule, rate, seed] for seed in range(arguments.seeds)]
            before, after = [curve[0] for curve in curves], [curve[-1] for curve in curves]
            margin = STUDENT_T[len(after)] * statistics.stdev(after) / len(after) ** 0.5
            print(
                f"| {baseline} | {schedule} | {rate:g} | {statistics.mean(before):.3f} | "
                f"{statistics.mean(after):.3f} +- {margin:.3f} | {min(after):.3f} |"
            )
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["baseline", "schedule", "eta_0", "seed", "accuracies from before to after"])
            for key, curve in results.items():
                writer.writerow([*key, " ".join(f"{value:.4f}" for value in curve)])


if __name__ == "__main__":
    main()
