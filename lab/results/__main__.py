"""Make the runs that are missing, part after part; what is there stays.

    python -m lab.results [--parts rates smollm2] [--processes 2]
    python -m lab.results --only-report [--parts groups_of_4] [--first "rloo, default rate"]

A line of a finished run goes into docs/results/claim/PART.csv at once, so that the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

from lab.results.book import Book
from lab.results.pace import pace_report
from lab.results.plan import PARTS, Part
from lab.results.policies import recipe_of
from lab.results.tables import along, rates_chosen, report
from lab.results.training import train_all

CSVS = Path(__file__).parents[2] / "docs" / "results" / "claim"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each on one thread")
    parser.add_argument("--folder", type=Path, default=Path("runs/results"), help="of runs that are not finished")
    parser.add_argument("--csvs", type=Path, default=CSVS)
    parser.add_argument("--only-report", action="store_true", help="print what the CSVs have")
    parser.add_argument("--first", default="", help="the arm that tables compare with, if not a part's first")
    args = parser.parse_args()
    if args.first and not all(any(arm.name == args.first for arm in PARTS[name].arms) for name in args.parts):
        parser.error(f"--first {args.first!r} is no arm of every part; name parts that have it with --parts")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs end with it, and go on where they stopped
    for name in args.parts:
        book = Book(args.csvs / f"{PARTS[name].shares or name}.csv")
        for planned in [] if args.only_report else PARTS[name].rounds(book):
            runs = {}
            for run, settings in planned:
                if run not in book.runs:
                    recipe, begins = recipe_of(run.policy, run.seed, args.folder)
                    runs[run] = recipe, {**begins, **settings}
            train_all(book, runs, args.folder / name, args.processes)
        part = replace(PARTS[name], arms=tuple(sorted(PARTS[name].arms, key=lambda arm: arm.name != args.first)))
        print("\n\n".join(filter(None, report_of(part, book))), flush=True)


def report_of(part: Part, book: Book) -> list[str]:
    """The tables of a part."""
    paced = part.paced or any(arm.searched for arm in part.arms)
    return [
        report(part, book),
        along(part, book),
        pace_report(part, book) if paced else "",
        rates_chosen(part, book),
    ]


if __name__ == "__main__":
    main()
