"""Side by side with TRL's GRPOTrainer and RLOOTrainer: held-out accuracy against samples and seconds, steps a second.

    python -m lab.benchmarks.against_trl --folder runs/against_trl [--seeds 5] [--steps 60] \\
        [--contenders trl-grpo grpo ...]
    python -m lab.benchmarks.against_trl --folder runs/against_trl_real --recipe smollm2-arithmetic \\
        --model models/smollm2-135m-instruct --seeds 3 --trl-rates 1e-6 3e-6 1e-5 --rates 1e-6 3e-6 1e-5

needs TRL (`pip install 'trl>=1.16,<1.17' accelerate datasets`). All contenders begin with the same model and train on
the same prompts, one process at a time, on one thread (`lab.benchmarks.trl_run` says how, and what the clock counts):
the model that is given or that the recipe names, or, of the recipe demo, one warm-started policy a seed. TRL's
contenders run at each of `--trl-rates`, ours that have a fixed rate at each of `--rates`, and at the recipe's if none
is given; `oblrpo_*` measure their own. With --search-seeds only so many seeds run at every rate, and the others at
the one that ended best on those. The contenders take turns within a seed, each seed beginning with another, so that
other work on the machine hits all alike. TRL draws its own completions; with --same-draws it is seeded as ours, and the
same algorithm has the same curve. Finished runs are not repeated: the command can be interrupted and called again. A
CSV is kept, from which --only-report takes the runs that are not there.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lab.benchmarks.runs import mean_interval, warm_starts
from lab.benchmarks.trl_run import OURS, TRL
from oblrpo.errors import InputError
from oblrpo.settings import TrainConfig, load_recipe

NUMBERS = ("step", "samples", "seconds", "cpu_seconds", "accuracy", "peak_mb")
COLUMNS = ("contender", "rate", "seed", *NUMBERS)
Rows = list[dict[str, float]]


class Variant(NamedTuple):
    """A contender at a learning rate."""

    contender: str
    rate: str = ""
    """As `g` formats it; empty: the recipe's, or one that is measured."""

    def __str__(self) -> str:
        return f"{self.contender} at {self.rate}" if self.rate else self.contender

    def place(self, seed: int) -> str:
        """Name of the folder of its run."""
        return "_".join(filter(None, [self.contender, self.rate, str(seed)]))


Found = dict[tuple[Variant, int], Rows]
"""What the clock and the evaluations of each finished run read, step 0 first, by variant and seed."""


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """Every contender at each of its rates."""
    found = []
    for name in arguments.contenders:
        rates = [] if name.startswith("oblrpo") else arguments.trl_rates if name in TRL else arguments.rates
        found += [Variant(name, f"{rate:g}") for rate in rates] or [Variant(name)]
    return found


def turns_of(arguments: argparse.Namespace, seed: int) -> list[Variant]:
    """The variants that a seed runs, in its order: all of them, or after the search each contender at its best rate."""
    turns, search = variants(arguments), arguments.search_seeds
    if search and seed >= search:
        ends: dict[Variant, list[float]] = {variant: [] for variant in turns}
        for (variant, other), rows in finished(arguments).items():
            if other < search:
                ends[variant].append(rows[-1]["accuracy"])
        found: dict[str, Variant] = {}
        for variant in turns:
            best = found.get(variant.contender)
            if best is None or statistics.mean(ends[variant]) > statistics.mean(ends[best]):
                found[variant.contender] = variant
        turns = list(found.values())
    turn = seed % len(turns)
    return turns[turn:] + turns[:turn]


def finished(arguments: argparse.Namespace) -> Found:
    """The runs that are there, with as many steps."""
    found: Found = {}
    for seed in range(arguments.seeds):
        for variant in variants(arguments):
            file = arguments.folder / variant.place(seed) / "clock.json"
            rows = json.loads(file.read_text()) if file.is_file() else []
            if rows and rows[-1]["step"] == arguments.steps:
                found[variant, seed] = rows
    return found


def starts_of(arguments: argparse.Namespace) -> dict[int, str | Path]:
    """The model that the runs of each seed begin with.

    Raises:
        InputError: the recipe builds its policy, and is not the demo, whose warm start is known here.
    """
    model = arguments.model or load_recipe(arguments.recipe, TrainConfig()).policy.model
    if model:
        return dict.fromkeys(range(arguments.seeds), model)
    if arguments.recipe != "demo":
        raise InputError(f"the recipe {arguments.recipe!r} names no model; give one with --model.")
    starts = warm_starts(arguments.folder, ["path"], arguments.seeds, 1)
    return {seed: starts["path", seed] for seed in range(arguments.seeds)}


def run_missing(arguments: argparse.Namespace, starts: Mapping[int, str | Path] | None = None) -> None:
    """One at a time, from each seed's model; what an interrupted run left is thrown away with its clock."""
    starts = starts_of(arguments) if starts is None else starts
    for seed in range(arguments.seeds):
        for variant in turns_of(arguments, seed):
            if (variant, seed) in finished(arguments):
                continue
            folder = arguments.folder / variant.place(seed)
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            words = words_of(arguments, variant, seed)
            with (folder.parent / f"{folder.name}.log").open("w") as log:
                subprocess.run(
                    [sys.executable, "-m", "lab.benchmarks.trl_run", variant.contender, starts[seed], folder, *words],
                    stdout=log, stderr=log, check=True,
                    env=os.environ | {"OMP_NUM_THREADS": str(arguments.threads)},
                )  # fmt: skip
            print(variant, seed, *(f"{row['accuracy']:.3f}" for row in finished(arguments)[variant, seed]), flush=True)
            write_csv(arguments.csv, read_csv(arguments.csv) | finished(arguments))


def words_of(arguments: argparse.Namespace, variant: Variant, seed: int) -> list[str]:
    """The flags of one run."""
    settings = {"seed": seed, "recipe": arguments.recipe} | ({"rate": variant.rate} if variant.rate else {})
    for name in ("steps", "every", "eval_prompts", "prompts", "generations", "threads"):
        settings[name.replace("_", "-")] = getattr(arguments, name)
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    switches = {"--same-draws": arguments.same_draws, "--no-ledger": arguments.no_ledger}
    return words + [word for word, on in switches.items() if on]


def write_csv(path: Path, found: Found) -> None:
    """A line an evaluated step."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for (variant, seed), rows in found.items():
            writer.writerows({**variant._asdict(), "seed": seed, **row} for row in rows)


def read_csv(path: Path) -> Found:
    """What `write_csv` has written, with this or other settings; nothing if it has not."""
    found: Found = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                variant = Variant(row["contender"], row.get("rate", ""))  # earlier files have no rates, no memory
                known = {name: row[name] for name in NUMBERS if row.get(name)}
                numbers = {name: (int if name in {"step", "samples"} else float)(text) for name, text in known.items()}
                found.setdefault((variant, int(row["seed"])), []).append(numbers)
    return found


def of(found: Found, variant: Variant) -> dict[int, Rows]:
    """A variant's runs by seed."""
    return {seed: rows for (name, seed), rows in found.items() if name == variant}


def per_step(rows: Rows, clock: str) -> float:
    """Seconds a step, over the whole run."""
    return rows[-1][clock] / rows[-1]["step"]


def seconds_by_seed(found: Found, contender: str, clock: str) -> dict[int, float]:
    """Seconds a step of each seed, over all rates, which do not change them."""
    taken: dict[int, list[float]] = {}
    for (variant, seed), rows in found.items():
        if variant.contender == contender:
            taken.setdefault(seed, []).append(per_step(rows, clock))
    return {seed: statistics.mean(values) for seed, values in taken.items()}


def ratio(found: Found, contender: str, rival: str, clock: str) -> str:
    """How many steps a contender does in a rival's time, seed by seed."""
    mine, others = (seconds_by_seed(found, name, clock) for name in (contender, rival))
    return mean_interval([others[seed] / mine[seed] for seed in sorted(mine.keys() & others.keys())])


def accuracy_at(rows: Rows, seconds: float) -> float | None:
    """Held-out accuracy when the clock read so much, linear between evaluations; None after the run's end."""
    for before, after in pairwise(rows):
        if before["seconds"] <= seconds <= after["seconds"]:
            share = (seconds - before["seconds"]) / (after["seconds"] - before["seconds"])
            return before["accuracy"] + share * (after["accuracy"] - before["accuracy"])
    return None


def table(titles: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *lines])


def throughput(found: Found, contenders: list[str]) -> str:
    """Steps a second, CPU seconds a step and memory of every contender, beside those of TRL's."""
    there = [name for name in contenders if any(variant.contender == name for variant, _ in found)]
    rivals = [name for name in there if name in TRL]
    titles = ["", "steps a second", *(f"over {rival}'s" for rival in rivals)]
    titles += ["CPU s a step", *(f"{rival}'s over it" for rival in rivals), "peak memory (GB)"]
    lines = []
    for name in there:
        runs = [rows for (variant, _), rows in found.items() if variant.contender == name]
        peaks = [rows[-1]["peak_mb"] for rows in runs if rows[-1].get("peak_mb")]
        cells = [name, mean_interval([1 / taken for taken in seconds_by_seed(found, name, "seconds").values()])]
        cells += [ratio(found, name, rival, "seconds") for rival in rivals]
        cells.append(f"{statistics.mean(per_step(rows, 'cpu_seconds') for rows in runs):.3f}")
        cells += [ratio(found, name, rival, "cpu_seconds") for rival in rivals]
        lines.append([*cells, f"{statistics.mean(peaks) / 1e3:.1f}" if peaks else ""])
    return table(titles, lines)


def report(found: Found, contenders: list[str], marks: list[float]) -> str:
    """Three tables: throughput, accuracy after samples, accuracy after seconds."""
    learnt, timed = [], []
    steps = sorted({int(row["step"]) for rows in found.values() for row in rows})
    samples = {int(row["step"]): int(row["samples"]) for rows in found.values() for row in rows}
    there = dict.fromkeys(variant for variant, _ in found)
    for variant in sorted(there, key=lambda each: (contenders.index(each.contender), float(each.rate or 0))):
        runs = list(of(found, variant).values())
        by_step = [[row["accuracy"] for rows in runs for row in rows if row["step"] == step] for step in steps]
        learnt.append([str(variant), *map(mean_interval, by_step)])
        at = [[accuracy_at(rows, mark) for rows in runs] for mark in marks]
        known = [[value for value in values if value is not None] for values in at]
        whole = [values if len(values) == len(runs) else [] for values in known]  # blank: some seed's run was over
        ends = statistics.mean(rows[-1]["seconds"] for rows in runs)
        timed.append([str(variant), *map(mean_interval, whole), f"{ends:.0f}"])
    tables = [
        throughput(found, contenders),
        table(["accuracy after samples", *(f"{samples[step]}" for step in steps)], learnt),
        table(["accuracy after seconds", *(f"{mark:g}" for mark in marks), "all steps take"], timed),
    ]
    return "\n\n".join(tables)


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def words(given: list[str] | None = None) -> argparse.Namespace:
    """What the command line says, or these words in its place."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/against_trl"))
    parser.add_argument("--recipe", default="demo", help="recipe or YAML file")
    parser.add_argument("--model", default="", help="folder that all begin with; the recipe's if none is given")
    parser.add_argument("--contenders", nargs="+", choices=[*TRL, *OURS], default=["trl-grpo", "trl-rloo", *OURS])
    parser.add_argument("--trl-rates", nargs="+", type=float, default=[], help="learning rates of TRL's contenders")
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="learning rates of ours that are fixed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--search-seeds", type=int, default=0, help="seeds that run every rate; 0: all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between measurements of held-out accuracy")
    parser.add_argument("--eval-prompts", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=0, help="prompts a step; 0: the recipe's")
    parser.add_argument("--generations", type=int, default=0, help="completions a prompt; 0: the recipe's")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a process")
    parser.add_argument("--seconds", nargs="+", type=float, default=[15, 30, 45, 60], help="marks of the last table")
    parser.add_argument("--same-draws", action="store_true", help="TRL samples with the random numbers of ours")
    parser.add_argument("--no-ledger", action="store_true", help="ours take no variance ledger")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what is there or in the CSV")
    arguments = parser.parse_args(given)
    arguments.csv = arguments.csv or arguments.folder / "runs.csv"
    return arguments


def main() -> None:
    arguments = words()
    if not arguments.only_report:
        if not _is_there("trl") and {*TRL} & {*arguments.contenders}:
            print("TRL is not installed; install it with: pip install 'trl>=1.16,<1.17'", file=sys.stderr)
            raise SystemExit(2)
        try:
            run_missing(arguments)
        except InputError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None
    found = read_csv(arguments.csv) | finished(arguments) if arguments.only_report else finished(arguments)
    found = {key: rows for key, rows in found.items() if key[0].contender in arguments.contenders}
    there = [name for name in ("trl", "transformers", "torch") if _is_there(name)]
    threads = "one thread" if arguments.threads == 1 else f"{arguments.threads} threads"
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in there) + f", {threads} a process.")
    print("Means over seeds with 95 % intervals (Student's t). Seconds are the wall's, which other work on the machine")
    print("lengthens; CPU time is the process's own.\n")
    print(report(found, arguments.contenders, arguments.seconds))


if __name__ == "__main__":
    main()
