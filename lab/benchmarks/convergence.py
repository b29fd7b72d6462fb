"""Where theorem 4's schedule pays: long runs of small policies, under rates that do and do not know the noise.

    python -m lab.benchmarks.convergence --csv docs/results/convergence.csv [--only-report]
    python -m lab.benchmarks.convergence --task path [--folder runs/convergence]

The policies, prompts and rewards are those of `lab.benchmarks.rate_rules`; in `noisy` every graded reward has normal
noise added, which does not vanish where the policy is right. A figure is the policy's exact expected reward after 1/8,
1/4, 1/2 and all of a run's T steps. `fixed` holds a rate. `cosine`, `root` and `inverse` know T but nothing of noise:
rate (1 + cos(pi t / T)) / 2, rate / sqrt(1 + t / b) and rate / (1 + t / b) with b = T / 100. `debiased` and `plugin`
are theorem 4's, `debiased-long` averages over 100 steps instead of 10, `kl` and `auto` are as in `SNRSchedule`, and
`auto-cosine` has torch's cosine on top. `kl` never goes above a rate of 1, less than SGD needs here, and runs with
AdamW alone.

Contenders of a seed begin as one policy and see the same prompts and random numbers. Each runs at every rate on the
tuning seeds; at the one that is best at their end on the others, which alone are reported. Every line of the CSV is a
run and a mark; finished runs are not repeated. With --task a built-in task is run instead, at two rates on one seed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from lab.benchmarks.crowd import MARKS, MEASURED, WORLDS, Job, Place, run
from lab.benchmarks.runs import Results, after_start, mean_interval, run_all, warm_starts

PLANNED = ("fixed", "cosine", "root", "inverse")
RATES = {
    "SGD": (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0),
    "AdamW": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}
HIGHER = 10
"""How many times higher the rates of `debiased` are, whose factor is small."""
UNTUNED = {"SGD": ("auto", "auto-cosine"), "AdamW": ("auto", "auto-cosine", "kl:kl=0.02", "kl:kl=0.1")}
TASK_RUNS = {
    "off": {"schedule": "off"},
    "cosine": {"schedule": "off", "lr_scheduler_type": "cosine"},
    "debiased": {"schedule": "debiased"},
    "auto": {"schedule": "auto"},
}
LOW_RATES = (1e-4, 3e-4)
TASK_RATES = {"debiased": (1e-3, 3e-3)}
"""Of who does not run at `LOW_RATES`."""


class Meeting(NamedTuple):
    """Where contenders meet on every seed."""

    optimizer: str
    world: str
    prompts: int
    steps: int

    def place(self, seed: int) -> Place:
        return Place(self.world, self.optimizer, self.prompts, self.steps, seed)


Found = dict[tuple[Place, str], dict[int, float]]
"""Expected rewards by place and contender, at every mark."""


def rates_of(kind: str, optimizer: str) -> list[float]:
    return [rate * (HIGHER if kind.startswith("debiased") else 1) for rate in RATES[optimizer]]


def named(kind: str, rate: float) -> str:
    return f"{kind}:rate={rate:g}"


def tuned(args: argparse.Namespace, found: Found, meeting: Meeting, kind: str) -> dict[float, float]:
    """The mean over the tuning seeds at the end of the run, at every rate that has them all."""
    means = {}
    for rate in rates_of(kind, meeting.optimizer):
        runs = [found.get((meeting.place(seed), named(kind, rate))) for seed in range(args.tuning_seeds)]
        if all(runs):
            means[rate] = statistics.mean(rewards[1] for rewards in runs if rewards)
    return means


def chosen(args: argparse.Namespace, found: Found, meeting: Meeting) -> list[str]:
    """Every contender that has a rate to choose, at its best."""
    tables = {kind: tuned(args, found, meeting, kind) for kind in (*PLANNED, *MEASURED)}
    return [named(kind, max(means, key=lambda rate: means[rate])) for kind, means in tables.items() if means]


def meetings(args: argparse.Namespace) -> list[Meeting]:
    return [Meeting(o, w, P, args.steps) for P, o, w in product(args.prompts, args.optimizers, args.worlds)]


def jobs(args: argparse.Namespace, found: Found) -> Iterator[Job]:
    """What is still to be run, the most telling first: the tuning seeds, then the others at the rates these chose."""
    for meeting in meetings(args):
        grid = [named(kind, rate) for kind in (*PLANNED, *MEASURED) for rate in rates_of(kind, meeting.optimizer)]
        for seed in range(args.tuning_seeds):
            yield Job(meeting.place(seed), tuple(grid))
        for seed in range(args.tuning_seeds, args.seeds):
            yield Job(meeting.place(seed), tuple(chosen(args, found, meeting)))
        for seed, contender in product(range(args.tuning_seeds, args.seeds), UNTUNED[meeting.optimizer]):
            yield Job(meeting.place(seed), (contender,))


def run_missing(args: argparse.Namespace, found: Found) -> None:
    for job in jobs(args, found):
        missing = tuple(name for name in job.contenders if (job.place, name) not in found)
        if missing:
            job, rewards = run(job._replace(contenders=missing))
            append(args.csv, job, rewards)
            found.update(read(args.csv))


def read(path: Path) -> Found:
    found: Found = {}
    for row in csv.DictReader(path.read_text().splitlines() if path.is_file() else []):
        place = Place(row["world"], row["optimizer"], *(int(row[name]) for name in ("prompts", "steps", "seed")))
        found.setdefault((place, row["contender"]), {})[place.steps // int(row["after"])] = float(row["reward"])
    return {run: rewards for run, rewards in found.items() if len(rewards) == len(MARKS)}


def append(path: Path, job: Job, rewards: dict[int, list[float]]) -> None:
    """A line a contender and mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head: list[list[object]] = [] if path.is_file() else [[*Place._fields, "contender", "after", "reward"]]
    lines: list[list[object]] = [
        [*job.place, contender, job.place.steps // mark, f"{rewards[mark][k]:.5f}"]
        for k, contender in enumerate(job.contenders)
        for mark in MARKS
    ]
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(head + lines)


def report(args: argparse.Namespace, found: Found) -> None:
    """For every meeting what the rates came to on the tuning seeds, and the contenders on the others."""
    for meeting in meetings(args):
        if names := chosen(args, found, meeting):
            print(f"\n{meeting.world}, {meeting.optimizer}, {meeting.prompts} prompts, {meeting.steps} steps")
            report_rates(args, found, meeting)
            report_contenders(args, found, meeting, [*names, *UNTUNED[meeting.optimizer]])


def report_rates(args: argparse.Namespace, found: Found, meeting: Meeting) -> None:
    rates = RATES[meeting.optimizer]
    print(f"\n| rate, {HIGHER} times for debiased | " + " | ".join(f"{rate:g}" for rate in rates) + " |")
    print("|---|" + "---|" * len(rates))
    for kind in (*PLANNED, *MEASURED):
        print(f"| {kind} | " + " | ".join(f"{mean:.3f}" for mean in tuned(args, found, meeting, kind).values()) + " |")


def report_contenders(args: argparse.Namespace, found: Found, meeting: Meeting, names: list[str]) -> None:
    """Mean rewards at every mark, and at the end each contender less `debiased` and less `fixed`, seed by seed."""
    print("\n| | " + " | ".join(f"1/{mark}" for mark in MARKS[:-1]) + " | all | less debiased | less fixed | seeds |")
    print("|---|" + "---|" * (len(MARKS) + 3))
    seeds = range(args.tuning_seeds, args.seeds)
    runs = {
        name: {seed: found[run] for seed in seeds if (run := (meeting.place(seed), name)) in found} for name in names
    }
    bases = [next(name for name in names if name.startswith(kind)) for kind in ("debiased:", "fixed:")]
    for name, mine in runs.items():
        cells = [mean_interval([rewards[mark] for rewards in mine.values()]) for mark in MARKS]
        for base in bases:
            both = mine.keys() & runs[base].keys() if name != base else ()
            cells.append(mean_interval([mine[seed][1] - runs[base][seed][1] for seed in both]))
        if mine:
            print(f"| {name} | " + " | ".join(cells) + f" | {len(mine)} |")


def task_keys(task: str) -> list[tuple[str, str, float, int]]:
    return [(task, name, rate, 0) for name in TASK_RUNS for rate in TASK_RATES.get(name, LOW_RATES)]


def train_task(args: argparse.Namespace, results: Results) -> None:
    """A built-in task under four schedules, each at two rates on one seed."""
    policy = warm_starts(args.folder, [args.task], 1, 1)[args.task, 0]
    common: dict[str, Any] = {
        "seed": 0,
        "prompts_per_step": 4,
        "num_generations": 4,
        "ledger_steps": 0,
    }
    common |= {
        "eval_steps": args.steps // MARKS[0],
        "eval_prompts": 512,
        "save_steps": args.steps // MARKS[0],
    }
    common |= {"optimizer_args": {"weight_decay": 0.0}}
    runs = {
        (task, name, rate, seed): (
            args.folder / f"{task}_{name}_{rate:g}",
            after_start(task, policy) | common | TASK_RUNS[name] | {"learning_rate": rate},
        )
        for task, name, rate, seed in task_keys(args.task)
    }
    run_all(runs, args.steps, 1, results)


def on_task(args: argparse.Namespace) -> None:
    """The runs of a built-in task that are not there yet, and held-out accuracy at every mark."""

    def accuracy(step: int) -> Callable[[list[dict[str, float]]], float]:
        return lambda metrics: next(row["eval/accuracy"] for row in metrics if row["step"] == step)

    numbers = {f"after {args.steps // mark}": accuracy(args.steps // mark) for mark in MARKS}
    results = Results(args.folder / f"{args.task}.csv", ["task", "contender", "rate", "seed"], numbers)
    if not args.only_report:
        train_task(args, results)
    print("| contender | rate | " + " | ".join(numbers) + " |\n|---|---|" + "---|" * len(numbers))
    for key in task_keys(args.task):
        if found := results.of(*key):
            print(f"| {key[1]} | {key[2]:g} | " + " | ".join(f"{found[name]:.3f}" for name in numbers) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 4, 64])
    parser.add_argument("--steps", type=int, help="12,000, or 10,000 of a task")
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path("runs/convergence.csv"))
    parser.add_argument("--only-report", action="store_true", help="print what the CSV has")
    parser.add_argument("--task", help="a built-in task (`lab.benchmarks.runs.STARTS`) instead of the small policies")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"), help="of a task's runs")
    args = parser.parse_args()
    args.steps = args.steps or (10_000 if args.task else 12_000)
    if args.task:
        on_task(args)
        return
    found = read(args.csv)
    if not args.only_report:
        run_missing(args, found)
    report(args, found)


if __name__ == "__main__":
    main()
