"""256 rollouts a step as few prompts with many outputs or many with few: what each baseline learns.

    python -m benchmarks.splits --folder runs/splits [--tasks path ...] [--seeds 5] [--steps 120] [--processes 2]

Each task's policy is warm-started once a seed; every run goes on from there with AdamW at a fixed rate of 3e-4. Prints,
as mean over seeds with a 95 % interval, the mean reward of the last 20 steps and held-out accuracy after the last, and
by how much the shrunk baseline with 64 prompts of 4 differs, seed by seed.
Finished runs are not repeated: the command can be interrupted and called again.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.runs import mean_interval, rows, run_all, task_settings, warm_starts, write_csv

OURS = "oblr_shrunk"
SPLITS = ((128, 2), (64, 4), (32, 8))
GROUP_SIZES = {
    # at which splits each baseline runs; the paper's form is RLOO at G = 2
    "oblr_shrunk": (2, 4, 8), "rloo": (2, 4, 8), "grpo": (2, 4, 8), "oblr": (4,), "js": (2,), "none": (2, 8),
}  # fmt: skip


def plan(arguments: argparse.Namespace) -> dict:
    starts = warm_starts(arguments.folder, arguments.tasks, arguments.seeds, arguments.processes)
    runs = {}
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for P, G in SPLITS:
                for baseline in arguments.baselines:
                    if G not in GROUP_SIZES[baseline]:
                        continue
                    settings = [
                        "--model", starts[task, seed], *task_settings(task), "--seed", seed, "--prompts-per-step", P,
                        "--num-generations", G, "--baseline", baseline, "--schedule", "off", "--learning-rate",
                        arguments.learning_rate, "--eval-steps", 0, "--eval-prompts", 256, "--save-steps", 40,
                        "--ledger", "off", "--calibration-steps", 0,
                    ]  # fmt: skip
                    runs[task, f"{P}x{G}", baseline, seed] = (
                        arguments.folder / f"{task}_{P}x{G}_{baseline}_{seed}", settings
                    )  # fmt: skip
    return runs


def last_20(metrics: list[dict]) -> float:
    return statistics.mean(row["reward"] for row in metrics[-20:])


def by_seed(arguments: argparse.Namespace, runs: dict, cell: tuple[str, str, str], value: Callable) -> dict[int, float]:
    """What every finished run of a task, split and baseline says."""
    keys = {seed: (*cell, seed) for seed in range(arguments.seeds)}
    found = {seed: rows(runs[key][0], arguments.steps) for seed, key in keys.items() if key in runs}
    return {seed: value(metrics) for seed, metrics in found.items() if metrics}


def report(arguments: argparse.Namespace, runs: dict) -> None:
    names = [f"{P}x{G}" for P, G in SPLITS]
    head = f"| baseline | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    for title, value in (
        ("reward of the last 20 steps", last_20),
        ("accuracy after", lambda m: m[-1]["eval/accuracy"]),
    ):
        for task in arguments.tasks:
            cells = {
                (split, name): by_seed(arguments, runs, (task, split, name), value)
                for split in names
                for name in arguments.baselines
            }
            start = by_seed(arguments, runs, (task, "32x8", "rloo"), lambda m: m[0]["eval/accuracy"])
            print(f"\n{task} ({mean_interval(list(start.values()))} before): {title}\n\n{head}")
            for name in arguments.baselines:
                shown = [list(cells[split, name].values()) for split in names]
                few = [f" ({len(each)})" if 0 < len(each) < arguments.seeds else "" for each in shown]
                print(f"| {name} | {' | '.join(mean_interval(e) + f for e, f in zip(shown, few, strict=True))} |")
            print(f"\n{OURS} at 64x4 less each, seed by seed\n\n{head}")
            ours = cells["64x4", OURS] if OURS in arguments.baselines else {}
            for name in arguments.baselines:
                others = [cells[split, name] for split in names]
                gains = [[ours[seed] - other[seed] for seed in ours.keys() & other.keys()] for other in others]
                print(f"| {name} | {' | '.join(map(mean_interval, gains))} |")
    if arguments.csv:
        header = ["task", "split", "baseline", "seed", "accuracy before", "after", "reward of the last 20 steps"]
        write_csv(
            arguments.csv, header, runs, arguments.steps,
            lambda m: [f"{m[0]['eval/accuracy']:.4f}", f"{m[-1]['eval/accuracy']:.4f}", f"{last_20(m):.4f}"],
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/splits"))
    parser.add_argument("--tasks", nargs="+", default=["path", "addition-high", "countdown"])
    parser.add_argument("--baselines", nargs="+", choices=GROUP_SIZES, default=list(GROUP_SIZES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what is there")
    arguments = parser.parse_args()
    runs = plan(arguments)
    if not arguments.only_report:
        run_all(runs, arguments.steps, arguments.processes)
    report(arguments, runs)


if __name__ == "__main__":
    main()
