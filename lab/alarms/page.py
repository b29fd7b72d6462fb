"""What `lab.pages` says of the diagnosis: conditions as their docstrings have them, cures, and what was found where."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from lab.alarms.sick import table as of_sick_runs
from lab.alarms.words import table as of_words
from oblrpo.diagnosis import CONDITIONS
from oblrpo.diagnosis.condition import Condition
from oblrpo.diagnosis.watch import words_of

FOUND, RUNS = Path("docs/results/alarms.csv"), Path("docs/results/alarms_runs.csv")

EVERY = 10  # steps a row, TRL's default
LINE = 30  # words


def conditions() -> str:
    """Every condition, with its docstring."""
    return "\n".join(_section(each) for each in CONDITIONS)


def cures() -> str:
    """Every condition in a line: its name, and as many sentences of its cure as a line holds."""
    lines = []
    for each in CONDITIONS:
        sentences = re.split(r"(?<=[.?]) ", _cure(each))
        while len(sentences) > 1 and len(" ".join(sentences).split()) > LINE:
            sentences.pop()
        link = f"[{each.name}](reference/conditions.md#{each.name.lower().replace(' ', '-')})"
        lines.append(f"- **{link}**{'' if each.wrong else ' (note)'}: {' '.join(sentences)}\n")
    return "".join(lines)


def _section(condition: Condition) -> str:
    lines = [f"### {condition.name[0].upper()}{condition.name[1:]}", "", condition.about, ""]
    lines += [] if condition.wrong else ["*A note.*", ""]
    needs = ", ".join(f"`{key}`" for key in condition.columns)
    return "\n".join([*lines, f"*Needs* {needs}.", ""])


def _cure(condition: Condition) -> str:
    """What to do, with names of settings as code."""
    shorter = {"shrink": ", or use the baseline oblr_shrunk", "shorten": "use a third of the rate"}
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", r"`\g<0>`", condition.cure.format_map(words_of(measured=False) | shorter))


def measured() -> str:
    """What was found in synthetic runs, and in real ones."""
    found, runs = _rows(FOUND), _rows(RUNS)
    lines = [
        f"| illness | condition | found | steps after, median | at the latest | meant to be within | found in {EVERY} "
        "times as many steps, a row each ten | steps after, median | at the latest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if row["condition"]:
            once, thin = (
                f"{row[f'found{mark}']} of {row[f'seeds{mark}']} | {row[f'median{mark}']} | {row[f'latest{mark}']}"
                for mark in ("", f"_{EVERY}")
            )
            lines.append(f"| {row['illness']} | {row['condition']} | {once} | {row['within']} | {thin} |")
    healthy, ill = ([row for row in found if bool(row["condition"]) == sick] for sick in (False, True))
    marks = {"": "logged every step", f"_{EVERY}": f"logged every {EVERY}"}
    early = [f"{_sum(ill, f'before{mark}')} of {_sum(ill, f'seeds{mark}')} {how}" for mark, how in marks.items()]
    well, solved, uneven = (
        " and ".join(f"{row[f'found{mark}']} {how}" for mark, how in marks.items()) for row in healthy
    )
    alarms = (f"{sum(int(row[f'alarms{mark}']) > 0 for row in runs)} {how}" for mark, how in marks.items())
    lines += [
        "",
        f"Before their illness began, ill runs had an alarm: {' and '.join(early)}. Of {healthy[0]['seeds']} healthy "
        f"synthetic runs had one: {well}; of {healthy[1]['seeds']} that solve their task: {solved}; of "
        f"{healthy[2]['seeds']} with rare successes or uneven scores: {uneven}.",
        f"Of {len(runs)} real runs that learn had one: {' and '.join(alarms)}.",
        "",
        f"| trainer | task | algorithm | runs | steps | alarms | logged every {EVERY} | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys((row["trainer"], row["task"], row["algorithm"]) for row in runs):
        of = [row for row in runs if (row["trainer"], row["task"], row["algorithm"]) == kind]
        told = " | ".join(str(_sum(of, key)) for key in ("alarms", f"alarms_{EVERY}", "notes"))
        lines.append(f"| {' | '.join(kind)} | {len(of)} | {of[0]['steps']} | {told} |")
    return "\n".join([*lines, "", of_sick_runs(), of_words()])


def _sum(rows: list[dict[str, str]], key: str) -> int:
    return sum(int(row[key]) for row in rows)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
