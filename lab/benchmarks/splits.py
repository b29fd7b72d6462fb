"""256 rollouts a step as few prompts with many outputs or many with few: what each baseline learns.

    python -m lab.benchmarks.splits --folder runs/splits [--tasks path ...] [--seeds 5] [--steps 120] [--processes 2]

Each task's policy is warm-started once a seed; every run goes on from there with AdamW at a fixed rate of 3e-4. Prints,
as mean over seeds with a 95 % interval, the mean reward of the last 20 steps and held-out accuracy after the last, and
by how much the shrunk baseline with 64 prompts of 4, and at the same split, differs, seed by seed.
Finished runs are not repeated: the command can be interrupted and called again. Tables are drawn from a CSV, with
--only-report from it alone.
"""

import argparse
import statistics
from pathlib import Path

from lab.benchmarks.runs import Results, after_start, mean_interval, run_all, warm_starts

OURS = "oblr_shrunk"
SPLITS = ((128, 2), (64, 4), (32, 8), (16, 16))
GROUP_SIZES = {
    # at which splits each baseline runs; the paper's form is RLOO at G = 2
    "oblr_shrunk": (2, 4, 8), "rloo": (2, 4, 8, 16), "grpo": (2, 4, 8, 16), "oblr": (4,), "js": (2,), "none": (2, 8),
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
                    settings = after_start(task, starts[task, seed]) | {
                        "seed": seed, "prompts_per_step": P, "num_generations": G, "baseline": baseline,
                        "schedule": "off", "learning_rate": arguments.learning_rate, "eval_steps": 0,
                        "eval_prompts": 256, "save_steps": 40, "ledger_steps": 0,
                    }  # fmt: skip
                    runs[task, f"{P}x{G}", baseline, seed] = (
                        arguments.folder / f"{task}_{P}x{G}_{baseline}_{seed}", settings
                    )  # fmt: skip
    return runs


def report(arguments: argparse.Namespace, results: Results) -> None:
    for task in arguments.tasks:
        start = results.by_seed(task, "32x8", "rloo", number="accuracy before", seeds=arguments.seeds)
        print(f"\n{task} ({mean_interval(list(start.values()))} before)")
        for number in ("reward of the last 20 steps", "after"):
            report_number(arguments, results, task, number)


def report_number(arguments: argparse.Namespace, results: Results, task: str, number: str) -> None:
    """Mean of every split and baseline, and what ours has over it, seed by seed."""
    names = [f"{P}x{G}" for P, G in SPLITS]
    head = f"| baseline | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    cells = {
        (name, split): results.by_seed(task, split, name, number=number, seeds=arguments.seeds)
        for name in GROUP_SIZES
        for split in names
    }
    print(f"\n{'accuracy after' if number == 'after' else number}\n\n{head}")
    for name in arguments.baselines:
        shown = [cells[name, split].values() for split in names]
        few = [f" ({len(each)})" if 0 < len(each) < arguments.seeds else "" for each in shown]
        print(f"| {name} | {' | '.join(mean_interval([*e]) + f for e, f in zip(shown, few, strict=True))} |")
    for title, mine in (("at 64x4", ["64x4"] * len(names)), ("at the same split", names)):
        print(f"\n{OURS} {title} less each, seed by seed\n\n{head}")
        for name in arguments.baselines:
            pairs = [(cells[OURS, own], cells[name, split]) for own, split in zip(mine, names, strict=True)]
            gains = [[ours[seed] - other[seed] for seed in ours.keys() & other.keys()] for ours, other in pairs]
            print(f"| {name} | {' | '.join(map(mean_interval, gains))} |")


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
    parser.add_argument("--only-report", action="store_true", help="print what the CSV has")
    arguments = parser.parse_args()
    numbers = {
        "accuracy before": lambda metrics: metrics[0]["eval/accuracy"],
        "after": lambda metrics: metrics[-1]["eval/accuracy"],
        "reward of the last 20 steps": lambda metrics: statistics.mean(row["reward"] for row in metrics[1:][-20:]),
    }
    file = arguments.csv or arguments.folder / "runs.csv"
    results = Results(file, ["task", "split", "baseline", "seed"], numbers)
    if not arguments.only_report:
        run_all(plan(arguments), arguments.steps, arguments.processes, results)
    report(arguments, results)


if __name__ == "__main__":
    main()
