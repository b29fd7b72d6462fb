"""What `oblrpo diagnose` finds, and where it cries wolf.

    python -m lab.alarms [RUN ...] [--seeds 40] [--healthy 200]

Every illness of `synthetic` is drawn with so many seeds, and healthy runs besides; and again ten times as long and
logged every ten steps, as TRL does, with a quarter of the seeds of illnesses. Folders of real runs that are known to
learn may follow, which are looked at as they are and as if they were logged so. docs/results/alarms.csv and
alarms_runs.csv hold what came out, and `lab.pages` writes the pages anew. A folder's name is
TASK_ALGORITHM_SEED. `lab.alarms.runs` makes the real runs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import pages
from lab.alarms.logged import thinned
from lab.alarms.page import EVERY, FOUND, RUNS
from lab.alarms.synthetic import ILLNESSES, healthy, ill, solved, uneven
from lab.alarms.uneven import Row
from oblrpo.diagnosis import Facts, Watch, diagnose, facts_of, facts_of_log
from oblrpo.runs import RunFolder
from oblrpo.runs.logs import read_log
from oblrpo.settings import settings_in

HEALTHY = ((healthy, "none"), (solved, "none, solved"), (uneven, "none, uneven rewards"))
FIRST = 20_000  # of the seeds: none of these had a part in the choice of a threshold


def of_illness(name: str, seeds: int) -> dict[str, object]:
    """How often and after how many steps an illness is found, and in how many runs something was before the onset."""
    onset, illness = ILLNESSES[name]
    found: dict[str, object] = {"illness": name, "condition": illness.finds, "within": illness.within}
    for every, many, mark in ((1, seeds, ""), (EVERY, max(1, seeds // 4), f"_{EVERY}")):
        after, before = [], 0
        for seed in range(FIRST, FIRST + many):
            watch = Watch(Facts(every=every)).over(ill(name, seed, every))
            before += any(finding.wrong and finding.found <= every * onset for finding in watch.findings)
            after += [watch.found[illness.finds].found - every * onset] if illness.finds in watch.found else []
        times = {"median": round(statistics.median(after)), "latest": max(after)} if after else {}
        told = {"seeds": many, "found": len(after), "median": "", "latest": "", "before": before} | times
        found |= {f"{key}{mark}": value for key, value in told.items()}
    return found


def of_healthy(seeds: int, draw: Callable[[int, int], list[Row]], name: str) -> dict[str, object]:
    """How many healthy runs have an alarm."""
    found: dict[str, Any] = {"illness": name, "condition": ""}
    for every, mark in ((1, ""), (EVERY, f"_{EVERY}")):
        found |= {f"seeds{mark}": seeds, f"found{mark}": 0}
        for seed in range(FIRST, FIRST + seeds):
            watch = Watch(Facts(every=every)).over(draw(seed, every))
            wrong = [finding for finding in watch.findings if finding.wrong]
            for finding in wrong:
                print(f"{name}, every {every}, seed {seed}, step {finding.found}: {finding}", flush=True)
            found[f"found{mark}"] += bool(wrong)
    return found


def of_run(folder: Path) -> dict[str, object]:
    """The alarms of a real run."""
    diagnosis = diagnose(folder)
    for finding in diagnosis.findings:
        print(f"{folder.name}, step {finding.found}: {finding}", flush=True)
    ours = RunFolder(folder) if (folder / "config.yaml").is_file() else None
    rows = ours.read_metrics() if ours else list(getattr(read_log(folder), "rows", []))
    facts = facts_of(settings_in(ours.config_file)) if ours else facts_of_log(rows)
    thin = Watch(replace(facts, every=EVERY)).over(thinned(rows, EVERY)).findings
    task, algorithm, seed = folder.name.rsplit("_", 2)
    return {
        "trainer": "TRL" if "TRL" in diagnosis.source else "oblrpo", "task": task, "algorithm": algorithm, "seed": seed,
        "steps": diagnosis.steps, "alarms": len(diagnosis.findings), "notes": len(diagnosis.notes),
        f"alarms_{EVERY}": sum(finding.wrong for finding in thin),
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as a CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1].keys(), lineterminator="\n")  # a healthy run, the first, has fewer
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure, and write the two CSV and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of real runs that learn")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=200)
    arguments = parser.parse_args()
    found = [of_healthy(arguments.healthy, *kind) for kind in HEALTHY]
    for name in ILLNESSES:
        found.append(of_illness(name, arguments.seeds))
        print(found[-1], flush=True)
    write(FOUND, found)
    if arguments.runs:
        write(RUNS, [of_run(run) for run in arguments.runs])
    pages.write()


if __name__ == "__main__":
    main()
