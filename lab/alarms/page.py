"""docs/failures.md: the conditions as their docstrings have them, and what was found where."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from oblrpo.diagnosis import CONDITIONS
from oblrpo.diagnosis.condition import Condition
from oblrpo.diagnosis.watch import words_of

FOUND, RUNS = Path("docs/results/alarms.csv"), Path("docs/results/alarms_runs.csv")

PAGE = Path("docs/failures.md")


def page() -> str:
    """The page as it is, with its two made parts anew: the table of conditions, and what was measured."""
    text = PAGE.read_text("utf-8")
    for name, part in {"conditions": conditions(), "measured": measured()}.items():
        before, _, rest = text.partition(f"<!-- begin {name} -->\n")
        _, _, after = rest.partition(f"<!-- end {name} -->")
        text = f"{before}<!-- begin {name} -->\n{part}<!-- end {name} -->{after}"
    return text


def conditions() -> str:
    """Every condition, with its docstring."""
    return "\n".join(_section(each) for each in CONDITIONS)


def _section(condition: Condition) -> str:
    what, _, looks = (condition.statistic.__doc__ or "").strip().partition("\n")
    lines = [f"### {condition.name[0].upper()}{condition.name[1:]}", "", f"{what} {' '.join(looks.split())}", ""]
    lines += [] if condition.wrong else ["It is printed as worth knowing, and leaves the exit code 0.", ""]
    cure = condition.cure.format_map({"shrink": ", or take the baseline oblr_shrunk"} | words_of(measured=False))
    needs = ", ".join(f"`{key}`" for key in condition.columns)
    return "\n".join([*lines, f"*Needs* {needs}. *What to do:* {_code(cure)}", ""])


def _code(text: str) -> str:
    """Names of settings, as code."""
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", r"`\g<0>`", text)


def measured() -> str:
    """What was found in synthetic runs, and in real ones."""
    found, runs = _rows(FOUND), _rows(RUNS)
    lines = [
        "| illness | condition | found | steps after, median | at the latest | meant to be within |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if row["condition"]:
            times = f"{row['found']} of {row['seeds']} | {row['median']} | {row['latest']} | {row['within']}"
            lines.append(f"| {row['illness']} | {row['condition']} | {times} |")
    (well, solved), ill = ([row for row in found if bool(row["condition"]) == sick] for sick in (False, True))
    before = sum(int(row["before"]) for row in ill)
    alarms = sum(int(row["alarms"]) > 0 for row in runs)
    lines += [
        "",
        f"Before their illness began, {before} of {sum(int(row['seeds']) for row in ill)} ill runs had an alarm. Of "
        f"{well['seeds']} healthy synthetic runs {well['found']} had one, of {solved['seeds']} that solve their task "
        f"{solved['found']}.",
        f"Of {len(runs)} real runs that learn {alarms} had one:",
        "",
        "| trainer | task | algorithm | runs | steps | alarms | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys((row["trainer"], row["task"], row["algorithm"]) for row in runs):
        of = [row for row in runs if (row["trainer"], row["task"], row["algorithm"]) == kind]
        alarms, notes = (sum(int(row[key]) for row in of) for key in ("alarms", "notes"))
        lines.append(f"| {' | '.join(kind)} | {len(of)} | {of[0]['steps']} | {alarms} | {notes} |")
    return "\n".join([*lines, ""])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
