"""A run as Python shows it: in lines of text, as HTML in a notebook, and its metrics on axes of matplotlib."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from oblrpo.errors import InputError, did_you_mean
from oblrpo.report.charts import Line, draw_line, short
from oblrpo.report.curves import CHART_OF, is_wide, line_of, reward
from oblrpo.report.html import render, seen
from oblrpo.report.record import RunRecord, accuracy, before_and_after, read_run, reward_of
from oblrpo.runs import from_here
from oblrpo.tables.metrics import ROW_OF, Chart

SHOWN, LONGEST = 3, 72  # held-out prompts in lines of text, and the most characters of one line's text


def as_text(path: Path) -> str:
    """Return what is known of a run in a few lines, with what it said to three held-out prompts before and after."""
    record = read_run(path)
    if record is None:
        return f"Run({str(from_here(path))!r}), no step is finished yet"
    lines = [f"Run({str(from_here(path))!r}), {_state(record)}"]
    lines += [f"{name:17} {figure}" for name, figure in _figures(record)]
    compared = before_and_after(record.folder, record.measured, SHOWN)
    lines += ["the same held-out prompts before and after, with their rewards:"] if compared else []
    for each in compared:
        lines.append(f"  {_quoted(each['prompt'])}")
        lines += [
            f"    {when:6} {reward_of(each[when]):>6}  {_quoted(each[when]['completion'])}"
            for when in ("before", "after")
        ]
    return seen("\n".join(lines))


def as_html(path: Path) -> str:
    """Return the same for a notebook, with the curve of the run's page, and eight prompts."""
    record = read_run(path)
    return render(
        "notebook.html",
        title=from_here(path),
        state=_state(record) if record else "no step is finished yet",
        facts=_figures(record) if record else (),
        curve=reward(record, CHART_OF["reward"])[0] if record and record.steps else "",
        pairs=before_and_after(record.folder, record.measured) if record else (),
        reward_of=reward_of,
    )


def _state(record: RunRecord) -> str:
    return f"{record.done} steps" if record.finished else f"step {record.done} of {record.integer('steps')}"


def _figures(record: RunRecord) -> list[tuple[str, str]]:
    """The figures of a run's first and last step, and what ended it, each only where it is known."""
    figures = [("failed", record.failure)] if record.failure else []
    rewards = [row["reward"] for row in record.steps if row["reward"] is not None]
    if rewards:
        figures.append(("reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"))
    if ends := [record.measured[0], *record.measured[1:][-1:]] if record.measured else []:
        figures.append(("held-out accuracy", " -> ".join(map(accuracy, ends))))
    if rates := [rate for row in record.steps if (rate := row.get("learning_rate"))]:
        figures.append(("learning rate", f"{short(rates[-1])}, of the last update"))
    return figures


def _quoted(text: str) -> str:
    """A text on one line; of a long one its beginning and its end, where prompts differ."""
    half = LONGEST // 2
    return repr(text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}")


def plot(record: RunRecord, keys: Sequence[str], axes: Axes | None = None) -> Axes:
    """Draw metrics on the axes, or on new ones of pyplot, and return them."""
    shown = [key for key in ("reward", "eval/accuracy") if any(row.get(key) is not None for row in record.rows)]
    keys = keys or shown or ["reward"]  # of a run without a reward it is said what there is
    lines = [_line(record, key) for key in keys]
    charts = [CHART_OF.get(key) or Chart("", key, key, getattr(ROW_OF.get(key), "unit", "")) for key in keys]
    if axes is None:
        from matplotlib import pyplot  # a notebook shows what pyplot has made

        axes = pyplot.subplots()[1]
        axes.set_title(charts[0].title if {*charts[0].keys.split()} == {*keys} else ", ".join(keys))
        if all(chart.logarithmic for chart in charts) and is_wide([value for line in lines for value in line.y]):
            axes.set_yscale("log")
    else:
        lines = [replace(line, label=f"{line.label}, {record.folder.path.name}".replace("$", r"\$")) for line in lines]
    for number, line in enumerate(lines, start=len(axes.get_legend_handles_labels()[1])):
        draw_line(axes, line, number)
    axes.set_xlabel("step")
    if len({chart.ylabel for chart in charts}) == 1:
        axes.set_ylabel(charts[0].ylabel)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend()
    return axes


def _line(record: RunRecord, key: str) -> Line:
    known = {name: value for row in record.rows for name, value in row.items() if isinstance(value, (int, float))}
    if key in known:
        return line_of(record, key)
    raise InputError(
        f"{record.folder.path} has no figures of the metric {key!r}.{did_you_mean(key, known)} It has: "
        f"{', '.join(known)}."
    )
