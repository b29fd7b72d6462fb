"""The parts of docs/ that tables of the source or of results know.

    python -m lab.pages

writes each anew between its marks `<!-- begin NAME -->` and `<!-- end NAME -->`; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from lab.alarms.page import conditions, cures, measured
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.tables.baselines import BASELINES
from oblrpo.tables.metrics import CHARTS, METRICS

DOCS = Path(__file__).parents[1] / "docs"


def algorithms() -> str:
    """The table `ALGORITHMS`."""
    parts = ("baseline", "normalisation", "weighting", "schedule", "ratio")
    rows = [
        (f"[`{name}`](#{name})", *(_code(getattr(row, part)) for part in parts), row.smallest_group)
        for name, row in ALGORITHMS.items()
    ]
    return _table(("algorithm", *parts, "least G"), rows)


def baselines() -> str:
    """The table `BASELINES`."""
    rows = []
    for name, entry in BASELINES.items():
        needs = ", ".join(map(_code, entry.needs))
        normalisation = "" if entry.normalisation == "none" else _code(entry.normalisation)
        unbiased, only = "yes" if entry.unbiased else "no", "" if entry.trainable else " (the ledger only)"
        rows.append((_code(name) + only, entry.meaning, unbiased, needs, normalisation, entry.smallest_group))
    return _table(("name", "b of completion j", "unbiased", "needs", "normalisation", "least G"), rows)


def metrics() -> str:
    """The table `METRICS`: those that a run of ours logs."""
    rows = []
    for metric in METRICS:
        if metric.ours:
            meaning = f"{metric.when}: {metric.meaning}" if metric.when else metric.meaning
            trl = _code(metric.trl) if "_" in metric.trl else metric.trl
            verl = _code(metric.verl) if metric.verl else ""
            rows.append((_codes(metric.keys), meaning, metric.unit, trl, verl))
    return _table(("key", "meaning", "unit", "in TRL", "in verl"), rows)


def charts() -> str:
    """The table `CHARTS`."""
    rows = [(chart.title, chart.note.replace("|", "\\|"), _codes(chart.keys), chart.advice) for chart in CHARTS]
    return _table(("chart", "how to read it", "metrics", "what to do"), rows)


PARTS = {
    "metrics.md": {"metrics": metrics, "charts": charts},
    "reference/algorithms.md": {"algorithms": algorithms},
    "baselines.md": {"baselines": baselines},
    "failures.md": {"cures": cures},
    "reference/conditions.md": {"conditions": conditions},
    "lab_book/diagnosis.md": {"measured": measured},
}


def page(name: str) -> str:
    """The page as it is, with its made parts anew."""
    text = (DOCS / name).read_text("utf-8")
    for part, make in PARTS[name].items():
        begin, end = f"<!-- begin {part} -->\n", f"<!-- end {part} -->"
        text = text[: text.index(begin) + len(begin)] + make() + text[text.index(end) :]
    return text


def write() -> None:
    """Write all of them."""
    for name in PARTS:
        (DOCS / name).write_text(page(name), "utf-8")


def _code(name: str) -> str:
    return f"`{name}`"


def _codes(keys: str) -> str:
    return ", ".join(map(_code, keys.split()))


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    write()
