"""What `oblrpo diagnose` finds, and where it cries wolf.

    python -m lab.alarms [RUN ...] [--seeds 40] [--healthy 200]

Every illness of `synthetic` is drawn with so many seeds, and healthy runs besides; folders of real runs that are known
to learn may follow. docs/results/alarms.csv and alarms_runs.csv hold what came out, and the page docs/failures.md is
written anew. A folder's name is TASK_ALGORITHM_SEED. `lab.alarms.runs` makes the real runs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from pathlib import Path

from lab.alarms.page import FOUND, PAGE, RUNS, page
from lab.alarms.synthetic import ILLNESSES, Row, healthy, ill, solved
from oblrpo.diagnosis import Watch, diagnose

FIRST = 20_000  # of the seeds: none of these had a part in the choice of a threshold


def of_illness(name: str, seeds: int) -> dict[str, object]:
    """How often and after how many steps an illness is found, and in how many runs something was before the onset."""
    onset, illness = ILLNESSES[name]
    after, before = [], 0
    for seed in range(FIRST, FIRST + seeds):
        watch = Watch().over(ill(name, seed))
        before += any(finding.wrong and finding.found <= onset for finding in watch.findings)
        after += [watch.found[illness.finds].found - onset] if illness.finds in watch.found else []
    return {
        "illness": name, "condition": illness.finds, "seeds": seeds, "found": len(after),
        "median": round(statistics.median(after)), "latest": max(after), "within": illness.within,
        "before": before,
    }  # fmt: skip


def of_healthy(seeds: int, draw: Callable[[int], list[Row]], name: str) -> dict[str, object]:
    """How many healthy runs have an alarm."""
    alarmed = 0
    for seed in range(FIRST, FIRST + seeds):
        wrong = [finding for finding in Watch().over(draw(seed)).findings if finding.wrong]
        for finding in wrong:
            print(f"{name}, seed {seed}, step {finding.found}: {finding}", flush=True)
        alarmed += bool(wrong)
    nothing = dict.fromkeys(("median", "latest", "within", "before"), "")
    return {"illness": name, "condition": "", "seeds": seeds, "found": alarmed} | nothing


def of_run(folder: Path) -> dict[str, object]:
    """The alarms of a real run."""
    diagnosis = diagnose(folder)
    for finding in diagnosis.findings:
        print(f"{folder.name}, step {finding.found}: {finding}", flush=True)
    task, algorithm, seed = folder.name.rsplit("_", 2)
    return {
        "trainer": "TRL" if "TRL" in diagnosis.source else "oblrpo", "task": task, "algorithm": algorithm, "seed": seed,
        "steps": diagnosis.steps, "alarms": len(diagnosis.findings), "notes": len(diagnosis.notes),
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as a CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure, and write the two CSV and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of real runs that learn")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=200)
    arguments = parser.parse_args()
    found = [of_healthy(arguments.healthy, *kind) for kind in ((healthy, "none"), (solved, "none, solved"))]
    for name in ILLNESSES:
        found.append(of_illness(name, arguments.seeds))
        print(found[-1], flush=True)
    write(FOUND, found)
    if arguments.runs:
        write(RUNS, [of_run(run) for run in arguments.runs])
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
