"""Completions to a target over a reference's, over the seeds of several comparisons.

    python -m lab.benchmarks.pooled docs/results/compare/algorithms-{path,countdown,addition-high}.csv \\
        [--reference rloo]

From the CSVs that `oblrpo compare` writes: of each variant the runs at its best rate (the one with the most seeds),
seed by seed over the reference's; geometric mean, 95 % interval by Student's t of the logarithms over all seeds. Blank
where a seed never arrives, or begins there. Seeds with which the reference itself does not arrive are left out for all,
which favours the reference; how many are left is said.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

from oblrpo.compare.table import factor
from oblrpo.intervals import geometric_mean

Arrivals = dict[str, dict[int, float]]
"""Completions to the target by variant and seed, infinite if it is not reached by learning."""


def arrivals(path: Path) -> Arrivals:
    """Read a comparison's CSV at each variant's best rate."""
    by_rate: dict[str, dict[str, dict[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            cell = row["completions_to_target"]
            reached = math.inf if cell in {"", "not reached"} else float(cell)
            one_step = int(row["completions"]) / max(int(row["steps"]), 1)
            runs = by_rate.setdefault(row["variant"], {}).setdefault(row["learning_rate"], {})
            runs[int(row["seed"])] = reached if reached > one_step else math.inf
    return {variant: max(rates.values(), key=len) for variant, rates in by_rate.items()}


def ratios(tables: list[Arrivals], variant: str, reference: str) -> list[float]:
    """Ratios of the seeds with which the reference arrives; infinite where the variant does not."""
    return [
        table[variant].get(seed, math.inf) / value
        for table in tables
        for seed, value in table[reference].items()
        if math.isfinite(value)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--reference", default="rloo")
    arguments = parser.parse_args()
    tables = [arrivals(path) for path in arguments.csv]
    shared = [variant for variant in tables[0] if all(variant in table for table in tables)]
    if arguments.reference not in shared:
        parser.error(f"--reference {arguments.reference} is not in every CSV; choose from: {', '.join(shared)}.")
    print(f"| variant | over {arguments.reference}'s | seeds that arrive |\n|---|---|---|")
    for variant in shared:
        found = ratios(tables, variant, arguments.reference)
        arrive = [ratio for ratio in found if math.isfinite(ratio)]
        whole = variant != arguments.reference and len(arrive) == len(found)
        print(f"| {variant} | {factor(geometric_mean(arrive)) if whole else ''} | {len(arrive)} of {len(found)} |")


if __name__ == "__main__":
    main()
