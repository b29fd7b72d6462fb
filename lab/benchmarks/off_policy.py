"""Several updates on each batch of completions: what every ratio learns, per completion and per second of CPU.

    python -m lab.benchmarks.off_policy --folder runs/off_policy --csv docs/results/off_policy.csv [--seeds 3]
    python -m lab.benchmarks.off_policy --csv docs/results/off_policy.csv --only-report
    python -m lab.benchmarks.off_policy --seconds

A run is `RATIO:UPDATES`. All begin, seed by seed, with the same warm-started policy of the task path, take batches of
32 prompts x 4 completions, the shrunk baseline and the measured rate; those of one update go on for longer, to be
compared at the same CPU time. `--seconds` prints the CPU seconds of a step by `time.process_time`, the runs in turn.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from pathlib import Path

import torch

from lab.benchmarks.runs import Results, after_start, mean_interval, run_all, run_of, warm_starts
from oblrpo.policy import make_policy
from oblrpo.rewards import Rewards
from oblrpo.trainer.setup import make_learner
from oblrpo.trainer.task import task_of

RATIOS = ("sequence", "ppo", "gspo", "cispo", "dppo", "none")
ON_POLICY = "sequence:1"
PROMPTS, GENERATIONS, STEPS, ON_POLICY_STEPS, EVERY = 32, 4, 40, 120, 20
SIZE = {"prompts_per_step": PROMPTS, "num_generations": GENERATIONS, "baseline": "oblr_shrunk", "schedule": "auto"}


def settings_of(run: str) -> dict:
    """The settings of a run that is written as RATIO:UPDATES."""
    ratio, _, updates = run.partition(":")
    several = {"num_iterations": int(updates), "ratio": ratio} if int(updates) > 1 else {}
    return SIZE | several | {"learning_rate": 1e-5, "ledger_steps": 0, "calibration_steps": 0}


def at(step: int):
    """The held-out accuracy after so many steps, NaN of a run that is shorter."""
    return lambda metrics: next((row["eval/accuracy"] for row in metrics if row["step"] == step), math.nan)


def make(told: argparse.Namespace, results: Results) -> None:
    """The runs that are not there yet, seed by seed."""
    for seed in range(told.seeds):
        policy = warm_starts(told.folder, ["path"], told.seeds, told.processes)["path", seed]
        for steps, chosen in ((ON_POLICY_STEPS, [ON_POLICY]), (STEPS, [run for run in told.runs if run != ON_POLICY])):
            runs = {}
            for run in chosen:
                if not results.of(run, seed):
                    runs[run, seed] = (
                        told.folder / f"{run.replace(':', '-')}_{seed}",
                        after_start("path", policy)
                        | settings_of(run)
                        | {"seed": seed, "eval_steps": EVERY, "eval_prompts": 512, "save_steps": 200},
                    )
            run_all(runs, steps, told.processes, results)


def seconds(runs: list[str], rounds: int) -> dict[str, float]:
    """CPU seconds of a step of each run, the median of rounds in which they take turns, from one policy each."""
    torch.set_num_threads(1)
    learners = {}
    for run in runs:
        config = run_of(Path("nowhere"), settings_of(run)).config
        task = task_of(config)
        learners[run] = task, make_learner(make_policy(config.policy), Rewards(task), config)
    spent: dict[str, list[float]] = {run: [] for run in runs}
    for step, (run, (task, learner)) in itertools.product(range(1, rounds + 2), learners.items()):
        begun = time.process_time()
        learner.step(task.train_batch(step, PROMPTS), step)
        spent[run].append(time.process_time() - begun)
    return {run: statistics.median(each[1:]) for run, each in spent.items()}


def report(told: argparse.Namespace, results: Results) -> None:
    """Accuracy after the same completions."""
    marks = [step for step in range(EVERY, ON_POLICY_STEPS + 1, EVERY) if step in {20, 40, 80, 120}]
    print("| ratio, updates a batch | " + " | ".join(f"step {step}" for step in marks) + " |")
    print("|" + "---|" * (1 + len(marks)))
    for run in told.runs:
        cells = []
        for step in marks:
            found = results.by_seed(run, number=f"step_{step}", seeds=told.seeds).values()
            cells.append(mean_interval([value for value in found if not math.isnan(value)]))
        print(f"| {run.replace(':', ', ')} | " + " | ".join(cells) + " |")


def main() -> None:
    every = [ON_POLICY, *(f"{ratio}:{updates}" for updates in (2, 4) for ratio in RATIOS)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/off_policy"))
    parser.add_argument("--csv", type=Path, default=Path("docs/results/off_policy.csv"))
    parser.add_argument("--runs", nargs="+", default=every)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", action="store_true", help="print the CPU seconds of a step, and train nothing")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each run with --seconds")
    parser.add_argument("--only-report", action="store_true", help="print what the CSV has")
    told = parser.parse_args()
    if told.seconds:
        for run, each in seconds(told.runs, told.rounds).items():
            print(f"{run}\t{each:.3f}")
        return
    results = Results(told.csv, ["run", "seed"], {f"step_{step}": at(step) for step in (0, 20, 40, 80, 120)})
    if not told.only_report:
        make(told, results)
    report(told, results)


if __name__ == "__main__":
    main()
