"""The table of what moves: every situation beside what should come out and what came out on 69a7883.

    python -m lab.moving [--only M1 M3 ...] [--seeds 0 1 2] [--output runs/moving]

Each situation trains the README's example (a tiny built policy, 32 prompts x 4 completions, 16 tokens), or what its row
says, on one thread: minutes a row. docs/results/moving.csv has one row a figure; rows of situations that were not
measured this time stay as they are. M3b and M3d need TRL: `.venv-trl/bin/python -m lab.moving --only M3b M3d`.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from lab.moving.place import Figures, Place
from lab.moving.situations import SITUATIONS, Situation

CSV = Path(__file__).parents[2] / "docs" / "results" / "moving.csv"
COLUMNS = ("situation", "seed", "figure", "value")
Rows = dict[tuple[str, str, str], str]
"""The CSV: (situation, seed, figure) -> value."""


def measured(situation: Situation, folder: Path, seeds: Sequence[int]) -> dict[int, Figures]:
    """A situation's figures by seed."""
    return {seed: situation.measure(Place(folder / f"seed_{seed}", seed)) for seed in seeds}


def read(file: Path) -> Rows:
    """What an earlier call has written."""
    if not file.is_file():
        return {}
    with file.open(newline="") as lines:
        return {(row["situation"], row["seed"], row["figure"]): row["value"] for row in csv.DictReader(lines)}


def write(file: Path, rows: Rows) -> None:
    """Write the CSV anew, situations in the table's order."""
    order = list(SITUATIONS)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(COLUMNS)
        known = [key for key in rows if key[0] in order]
        writer.writerows((*key, rows[key]) for key in sorted(known, key=lambda key: order.index(key[0])))


def number(text: str) -> str:
    """A value as the table has it: three digits, no leading zero; a step that does not come is never."""
    value = float(text)
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "never"
    shown = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return shown.replace("0.", ".", 1) if shown.lstrip("-").startswith("0.") else shown


def now(name: str, rows: Rows) -> str:
    """The last cell of a situation's row: each figure with its seeds."""
    figures: dict[str, list[str]] = {}
    for (situation, _, figure), value in rows.items():
        if situation == name and not figure.startswith("("):
            figures.setdefault(figure, []).append(number(value))
    return "; ".join(f"{figure} **{', '.join(values)}**" for figure, values in figures.items())


def table(rows: Rows) -> str:
    """The whole table, of the situations that the rows have."""
    lines = ["| | situation | what should be | on 69a7883 | now |", "|---|---|---|---|---|"]
    for name, situation in SITUATIONS.items():
        if cell := now(name, rows):
            lines.append(f"| {name} | {situation.what} | {situation.should} | {situation.before} | {cell} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the CSV after every situation, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SITUATIONS), metavar="NAME", help="all that can, if not said")
    parser.add_argument("--seeds", nargs="+", type=int, help="those of each situation, if none are given")
    parser.add_argument("--output", type=Path, default=Path("runs/moving"), help="folder of the runs")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--only-report", action="store_true", help="print the table of what the CSV has")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows = read(args.csv)
    able = [name for name, situation in SITUATIONS.items() if situation.can]
    chosen = args.only or (list(SITUATIONS) if args.only_report else able)
    for name in [] if args.only_report else chosen:
        begun, situation = time.monotonic(), SITUATIONS[name]
        figures = measured(situation, args.output / name, args.seeds or situation.seeds)
        rows = {key: value for key, value in rows.items() if key[0] != name}
        for seed, found in figures.items():
            rows |= {(name, str(seed), figure): f"{value:.6g}" for figure, value in found.items()}
        write(args.csv, rows)
        print(f"{name}: {now(name, rows)}  ({(time.monotonic() - begun) / 60:.1f} min)", flush=True)
    print(f"\n{table({key: value for key, value in rows.items() if key[0] in chosen})}")


if __name__ == "__main__":
    main()
