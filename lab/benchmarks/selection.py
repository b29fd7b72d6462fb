"""Training on what pulls: what it saves and what it costs, beside training on everything and beside TRL.

    python -m lab.benchmarks.selection [--folder runs/selection] [--csv docs/results/selection.csv] [--seeds 3]
    python -m lab.benchmarks.selection --recipe smollm2-arithmetic --model models/smollm2-135m-instruct --rate 3e-6

needs TRL (`pip install 'trl>=1.16,<1.17' accelerate datasets`). Runs are those of `lab.benchmarks.against_trl`: one
process at a time on one thread, each seed's contenders beginning with one policy, on the same prompts, in turns: TRL's
GRPO, RLOO with exact skip, `oblrpo_shrunk` on all outputs and with outputs drawn by their pull, as `oblrpo train` has
them, ledger, checkpoints and all. Finished runs are not repeated; a CSV is kept, from which --only-report takes what is
not there. CPU seconds are the process's own. `lab.benchmarks.selection_steps` measures single steps of a trained
policy.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path

from lab.benchmarks import against_trl
from lab.benchmarks.against_trl import Found, Rows
from lab.benchmarks.runs import mean_interval

CONTENDERS = ("trl-grpo", "rloo", "oblrpo_shrunk", "shrunk-optimal")
ENOUGH = 0.8
"""The share of the best accuracy that seconds are counted to."""


def words_of(arguments: argparse.Namespace) -> argparse.Namespace:
    """The words of the runs."""
    rates = [f"{rate:g}" for rate in arguments.rate]
    words = ["--folder", str(arguments.folder), "--csv", str(arguments.csv), "--recipe", arguments.recipe]
    words += ["--seeds", str(arguments.seeds), "--steps", str(arguments.steps), "--every", str(arguments.every)]
    words += ["--eval-prompts", str(arguments.eval_prompts), "--contenders", *arguments.contenders]
    words += ["--model", arguments.model] if arguments.model else []
    return against_trl.words([*words, "--trl-rates", *rates, "--rates", *rates, "--search-seeds", "1"])


def rows_of(found: Found, contender: str) -> dict[int, Rows]:
    """A contender's runs by seed; where it ran at several rates, at the one that ended best on those."""
    runs = {variant: against_trl.of(found, variant) for variant, _ in found if variant.contender == contender}
    ended = {variant: statistics.mean(rows[-1]["accuracy"] for rows in of.values()) for variant, of in runs.items()}
    most = max((len(of) for of in runs.values()), default=0)
    whole = [variant for variant in runs if len(runs[variant]) == most]
    return runs[max(whole, key=lambda variant: ended[variant])] if whole else {}


def seconds_a_step(rows: Rows, begin: float = 0.0) -> float:
    """CPU seconds of a step from a share of the run on."""
    last = rows[-1]
    first = next(row for row in rows if row["step"] >= begin * last["step"])
    return (last["cpu_seconds"] - first["cpu_seconds"]) / (last["step"] - first["step"])


def seconds_to(rows: Rows, accuracy: float) -> float | None:
    """CPU seconds until held-out accuracy was first so high, linear between measurements; None if it never was."""
    for before, after in pairwise(rows):
        if after["accuracy"] >= accuracy > before["accuracy"]:
            share = (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["cpu_seconds"] + share * (after["cpu_seconds"] - before["cpu_seconds"])
    return 0.0 if rows[0]["accuracy"] >= accuracy else None


def ratio(mine: dict[int, float | None], theirs: dict[int, float | None]) -> str:
    """Theirs over mine, seed by seed, of the seeds that both have."""
    pairs = [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]
    return mean_interval([other / own for own, other in pairs if own and other])


def learned(found: Found) -> str:
    """Speed over TRL's GRPO, held-out accuracy, and seconds to most of the best of it."""
    runs = {name: of for name in CONTENDERS if (of := rows_of(found, name))}
    best = max(accuracy for of in runs.values() for accuracy in _means(of))
    taken = {name: {s: seconds_to(rows, ENOUGH * best) for s, rows in of.items()} for name, of in runs.items()}
    speed = {
        (name, begin): {s: seconds_a_step(rows, begin) for s, rows in of.items()}
        for name, of in runs.items() for begin in (0.0, 0.5)
    }  # fmt: skip
    lines = []
    for name, of in runs.items():
        cells = [name, mean_interval(list(speed[name, 0.0].values()))]
        cells += [ratio(speed[name, begin], speed["trl-grpo", begin]) for begin in (0.0, 0.5)]
        ends, areas = [rows[-1]["accuracy"] for rows in of.values()], [_mean(rows) for rows in of.values()]
        cells += [mean_interval(ends), mean_interval(areas)]
        cells.append(mean_interval([value for value in taken[name].values() if value is not None]))
        lines.append([*cells, ratio(taken["rloo"], taken[name]), ratio(taken["trl-grpo"], taken[name])])
    titles = ["", "CPU s a step", "TRL's over it", "the same, second half", "accuracy at the end", "mean accuracy"]
    titles += [f"CPU s to accuracy {ENOUGH * best:.3f}", "over RLOO's", "over TRL's"]
    return against_trl.table(titles, lines)


def _means(runs: dict[int, Rows]) -> list[float]:
    """The accuracy at every measurement, mean over seeds."""
    return [statistics.mean(row["accuracy"] for row in at) for at in zip(*runs.values(), strict=True)]


def _mean(rows: Rows) -> float:
    """Held-out accuracy averaged over completions, by trapezia."""
    areas = [(b["step"] - a["step"]) * (a["accuracy"] + b["accuracy"]) / 2 for a, b in pairwise(rows)]
    return sum(areas) / rows[-1]["step"]


def words() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/selection"))
    parser.add_argument("--csv", type=Path, help="that of the folder if none is given")
    parser.add_argument("--recipe", default="demo", help="recipe or YAML file")
    parser.add_argument("--model", default="", help="folder that all begin with; the recipe's if none is given")
    parser.add_argument("--rate", nargs="+", type=float, default=[4e-4], help="of RLOO and TRL; seed 0 tries several")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10, help="steps between measurements of held-out accuracy")
    parser.add_argument("--eval-prompts", type=int, default=256)
    parser.add_argument("--only-report", action="store_true", help="print what is there or in the CSV")
    arguments = parser.parse_args()
    arguments.csv = arguments.csv or arguments.folder / "selection.csv"
    return arguments


def main() -> None:
    arguments = words()
    given = words_of(arguments)
    given.csv.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.only_report:
        against_trl.run_missing(given)
    print("Means over seeds with 95 % intervals (Student's t), one thread, CPU time of the process.\n")
    print(learned(against_trl.read_csv(given.csv) | against_trl.finished(given)))


if __name__ == "__main__":
    main()
