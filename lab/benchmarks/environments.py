"""Learning curves of the two environments in examples/: the default, RLOO at its best rate, and without the tool.

    python -m lab.benchmarks.environments [prices guess] [--seeds 1 2 3 4 5] [--runs runs/environments]
    python -m lab.benchmarks.environments --table

Each seed builds the examples' small policy and lets it imitate their careless episodes; all variants go on from there,
but for the one without the tool, which imitates their answers alone.
RLOO's rate is the best of `RATES` by the last held-out reward of the seeds in `CHOOSE`, which are not measured again.
Seconds are the CPU's, of sampling (tools included), rewards, looks and training, but not of evaluation; all runs are
made in this process, one after another. A finished run is not repeated; docs/results/environments.csv is written anew
after each. The table has means over seeds with 95 % intervals by Student's t, and paired differences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from matplotlib import rc_context

import oblrpo
from lab.benchmarks.curves import Curves, Point, accuracy_at, read_csv, table, write_csv
from lab.benchmarks.pictures import FOLDER, INK, RIGHT, STYLE, WRONG, figure
from oblrpo import clock
from oblrpo.intervals import mean

ROOT = Path(__file__).parents[2]
EXAMPLES, CSV = ROOT / "examples" / "environments", ROOT / "docs" / "results" / "environments.csv"
RATES, CHOOSE = ("3e-4", "1e-3", "3e-3", "1e-2"), (101, 102)
NO_TOOLS: dict[str, Any] = {"environment": None, "chat": True}
MEASURED, NO_TOOL = ("default", "measured"), ("no tool", "measured")
EVERY: dict[str, Any] = {
    "prompts_per_step": 16, "eval_steps": 5, "eval_samples": 2, "eval_prompts": 128, "heldout_fraction": 0.1,
    "device": "cpu", "threads": 1, "progress": False, "save_steps": 0,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "prices": {"steps": 30, "num_generations": 8, "max_completion_length": 24, "reward": "exact"},
    "guess": {"steps": 40, "num_generations": 8, "max_completion_length": 48, "max_turns": 5},
}
WARM = {"prices": 300, "guess": 100}  # gradient steps on 16 episodes each


def train(folder: Path, name: str, warm: int = 0, **settings: Any) -> list[Point]:
    """What was measured along a run, which is made if it is not there."""
    points = folder.with_suffix(".json")
    if not points.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        sys.path.insert(0, str(EXAMPLES))
        import data
        import guess
        import prices

        rows = list(getattr(data, name)())
        given = EVERY | SIZES[name] | {"environment": {"prices": prices.Prices, "guess": guess.Guess}[name]} | settings
        if warm:
            shown = list(getattr(data, f"{name}_shown")())
            if given["environment"] is None:  # answers without calls
                shown = [row | {"completion": row["completion"][-1:]} for row in shown]
            how = {"learning_rate": 3e-3, "batch": 16}
            given |= {"sft_data": shown, "warm_start_steps": warm, "warm_start_args": how, "steps": 0}
        run = oblrpo.train(data=rows, output=str(folder), **given)
        points.write_text(json.dumps(points_of(run.metrics, given["prompts_per_step"] * given["num_generations"])))
    found: list[Point] = json.loads(points.read_text())
    return found


def points_of(rows: list[dict[str, Any]], completions: int) -> list[Point]:
    """Held-out reward by completions and by seconds; `time/...` are the CPU's here."""
    found, seconds = list[Point](), 0.0
    for row in rows:
        parts = ("sampling", "rewards", "looks", "training")
        seconds += sum(row.get(f"time/{part}", 0.0) for part in parts) if row["step"] else 0.0
        if row.get("eval/accuracy") is not None:
            at = {"step": row["step"], "completions": row["step"] * completions, "seconds": seconds}
            found.append(at | {"accuracy": row["eval/accuracy"]})
    return found


def started(runs: Path, name: str, seed: int, **settings: Any) -> str:
    """A policy that has imitated episodes, or only the answers at their ends."""
    folder = runs / name / (f"warm_answers_{seed}" if settings else f"warm_{seed}")
    if not folder.with_suffix(".json").is_file():
        sys.path.insert(0, str(EXAMPLES))
        import small_policy

        small_policy.main(str(runs / f"small_{seed}"), seed)
    train(folder, name, WARM[name], model=str(runs / f"small_{seed}"), seed=seed, **settings)
    return str(folder / "checkpoints" / "step_0")


def measure(runs: Path, name: str, seeds: list[int]) -> None:
    """All runs of an environment; each goes into the CSV when it ends."""

    def learn(key: tuple[str, str], seed: int, **settings: Any) -> float:
        folder = runs / name / f"{'_'.join(key).replace(' ', '_')}_{seed}"
        alone = NO_TOOLS if key == NO_TOOL else {}
        points = train(folder, name, model=started(runs, name, seed, **alone), seed=seed, **settings | alone)
        curves = read_csv(CSV) if CSV.is_file() else {}
        curves.setdefault((f"{name} {key[0]}", key[1]), {})[seed] = points
        write_csv(CSV, curves)
        print(
            name, *key, seed, f"{points[-1]['accuracy']:.3f} after {points[-1]['seconds']:.1f} CPU seconds", flush=True
        )
        return points[-1]["accuracy"]

    def rloo(rate: str, seed: int) -> float:
        return learn(("RLOO", rate), seed, algorithm="rloo", learning_rate=float(rate))

    tried = {rate: sum(rloo(rate, seed) for seed in CHOOSE) for rate in RATES}
    best = max(tried, key=tried.__getitem__)
    for seed in seeds:
        learn(MEASURED, seed)
        rloo(best, seed)
        if name == "prices":
            learn(NO_TOOL, seed)


def measured(curves: Curves) -> Curves:
    """Without the seeds that chose a rate."""
    kept = {key: {seed: points for seed, points in by.items() if seed not in CHOOSE} for key, by in curves.items()}
    return {key: by for key, by in kept.items() if by}


def differences(curves: Curves, name: str, clock: str, marks: list[float]) -> str:
    """The default less RLOO at its best rate, by seed."""
    ours = curves[f"{name} default", "measured"]
    theirs = next(by for (variant, _), by in curves.items() if variant == f"{name} RLOO")
    cells = []
    for mark in marks:
        both = [
            (accuracy_at(ours[seed], clock, mark), accuracy_at(theirs[seed], clock, mark))
            for seed in ours & theirs.keys()
        ]
        known = [one - other for one, other in both if one is not None and other is not None]
        found = mean(known) if len(known) > 2 else None
        cells.append(f"{found.value:+.3f} +- {found.margin:.3f}" if found else "")
    return f"| {name}: default less RLOO | | {len(ours)} | " + " | ".join(cells) + " |"


def picture(curves: Curves) -> None:
    """Means over seeds by completions and by CPU seconds."""
    names = list(SIZES)
    with rc_context(STYLE):
        page, axes = figure(len(names), 2.9)
        for each, name in zip(axes, names, strict=True):
            for (variant, rate), by_seed in curves.items():
                if not variant.startswith(name):
                    continue
                kind = variant.removeprefix(f"{name} ")
                colour = {"default": RIGHT, "RLOO": WRONG}.get(kind, INK)
                label = {"default": "oblrpo, no rate set", "RLOO": f"RLOO at {rate}, the best of four"}
                for points in by_seed.values():
                    each.plot(
                        [p["completions"] for p in points],
                        [p["accuracy"] for p in points],
                        color=colour,
                        alpha=0.25,
                        lw=1,
                    )
                steps = zip(*by_seed.values(), strict=True)
                average = [(at[0]["completions"], sum(p["accuracy"] for p in at) / len(at)) for at in steps]
                each.plot(*zip(*average, strict=True), color=colour, lw=2, label=label.get(kind, "without the tool"))
            each.set(title=name, xlabel="completions", ylabel="held-out reward", ylim=(0, 1))
            each.legend(frameon=False, fontsize=8)
        page.savefig(FOLDER / "environments.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--runs", type=Path, default=Path("runs/environments"))
    parser.add_argument("--table", action="store_true", help="only table and picture, of what there is")
    asked = parser.parse_args()
    clock.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    for name in [] if asked.table else asked.names:
        measure(asked.runs, name, asked.seeds)
    curves = measured(read_csv(CSV))
    for name in asked.names:
        own = {key: by for key, by in curves.items() if key[0].startswith(name)}
        for by, marks in (("completions", 4), ("seconds", 3)):
            acting = [by_seed for (variant, _), by_seed in own.items() if not variant.endswith(NO_TOOL[0])]
            most = min(points[-1][by] for by_seed in acting for points in by_seed.values())
            at = [most * part / marks for part in range(marks + 1)]
            print(f"\nheld-out reward of {name} after {by}\n\n{table(own, by, [float(f'{mark:.3g}') for mark in at])}")
            print(differences(own, name, by, at))
    picture(curves)


if __name__ == "__main__":
    main()
