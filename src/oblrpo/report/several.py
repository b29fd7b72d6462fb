"""Several runs laid over one another on one page; each has one colour throughout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from oblrpo.errors import InputError
from oblrpo.report.charts import line_style
from oblrpo.report.curves import CHART_OF, drawn, line_of
from oblrpo.report.html import markup, render, with_code
from oblrpo.report.page import facts_of_run, found_in, pairs_of
from oblrpo.report.record import PLACES, RunRecord, read_any
from oblrpo.runs import write_atomically
from oblrpo.settings import yaml_line
from oblrpo.tables.metrics import AVERAGED_STEPS, CHARTS

BANDS = "Bands: 95 % intervals over prompts."
AVERAGED = f"Mean over {AVERAGED_STEPS} steps."
OF_REWARDS = ("data", "task", "rewards")  # settings that rewards belong to
PAIRS = next(chart for chart in CHARTS if chart.kind == "before_and_after")
LINES = (
    ("reward", "Reward", f"{AVERAGED} {BANDS}"),
    ("eval/accuracy", "Held-out accuracy", BANDS),
    ("learning_rate", "Learning rate", "Of the steps that made an update."),
    ("n_snr", "Signal to noise of the batch gradient", "N SNR with its 95 % interval."),
    ("completions/mean_length", "Completion length", AVERAGED),
)
"""The metric of each chart, and its title and note here."""


def write_together(runs: Sequence[Path], path: Path) -> Path:
    """Write the page of several runs, ours or of TRL, and return its path."""
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(runs):
        names = list(map(str, runs))
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise InputError(f"{twice} is given twice; give each run once.")
    records = {name: read_any(run) for name, run in zip(names, runs, strict=True)}
    facts = {name: {fact: figure for fact, figure, _ in facts_of_run(record)} for name, record in records.items()}
    heads = list(dict.fromkeys(fact for figures in facts.values() for fact in figures))
    rows = []
    for number, (name, record) in enumerate(records.items()):
        run = markup("<span style='color: {}'>●</span> {}", line_style(number)[0], name)
        found = "; ".join(finding.name for finding in found_in(record).findings) or "no problem"
        rows.append([run, f"{record.done}", *(facts[name].get(head, "").replace(" ", "\xa0") for head in heads), found])
    known = {key: {str(r.settings[key]) for r in records.values() if key in r.settings} for key in OF_REWARDS}
    page = render(
        "several.html",
        title=" beside ".join(names),
        reload_seconds=0,
        abouts=[with_code(about) for about in dict.fromkeys(record.about for record in records.values()) if about],
        heads=["run", "steps", *heads, "diagnosis"],
        rows=rows,
        apart=[key for key, values in known.items() if len(values) > 1],
        pairs=pairs_of(records, PAIRS),
        drawings=_charts(records),
        names=names,
        differing=_differing(records),
    )
    write_atomically(path, page)
    return path


def _charts(records: Mapping[str, RunRecord]) -> list[Markup]:
    """Draw a line a run in each chart that one of them has something for."""
    drawings = []
    for key, title, note in LINES:
        found = {name: line_of(record, key) for name, record in records.items()}
        # A run without values keeps its colour, and stands in no legend.
        lines = [replace(line, label=name if line.x else "", dots=None) for name, line in found.items()]
        if any(line.x for line in lines):
            chart = CHART_OF[key]
            values = [y for line in lines for y in line.y]
            drawings.append(drawn(replace(chart, title=title, note=note), lines, values, chart.levels))
    return drawings


def _differing(records: Mapping[str, RunRecord]) -> list[list[Markup | str]]:
    """Return the settings that two runs have differently, a row each; a run of TRL has few that are known."""
    rows: list[list[Markup | str]] = []
    for key in dict.fromkeys(key for record in records.values() for key in record.settings if key not in PLACES):
        values = [record.settings.get(key) for record in records.values()]  # None: not known, or not set
        words = ["" if value is None else yaml_line(value) if value or value == 0 else "default" for value in values]
        if len(set(filter(None, words))) > 1:
            rows.append([markup("<code>{}</code>", word) for word in (key, *words)])
    return rows
