"""OUTPUT/compare.html: the whole comparison on one page."""

from pathlib import Path

from oblrpo.compare import charts
from oblrpo.compare.summary import Summary
from oblrpo.compare.table import HEADS, difference, interval, lines, notes, p_value, window
from oblrpo.report import html
from oblrpo.report.html import text
from oblrpo.runs import write_atomically
from oblrpo.settings import flatten, yaml_text

CURVES = (
    "Bands of curves: 95 % by Student's t over seeds; with two seeds, their range. A curve ends where the first of its "
    "runs does. Bars against learning rate: lowest and highest seed."
)


def write_page(summary: Summary, folder: Path) -> Path:
    """Write `compare.html` and return its path."""
    spec, title = summary.spec, summary.spec.name.removesuffix(".yaml")
    body = [f"<h1>{text(title)}</h1>", *([f"<p>{text(spec.about)}</p>"] if spec.about else []), _headline(summary)]
    # A figure may break before a bracket and after the commas within it, and nowhere else.
    cells = [
        [text(cell).replace(" ", "&nbsp;").replace("&nbsp;(", " (").replace(",&nbsp;", ", ") for cell in line]
        for line in lines(summary)
    ]
    sentences = "".join(f"<li>{text(note)}" for note in [*notes(summary), CURVES])
    body += [html.table(map(text, HEADS), cells), f"<ul class=notes>{sentences}</ul>"]
    sections = {
        "Learning": [*charts.learning(summary), *charts.completions(summary), *charts.differences(summary)],
        "Learning rates": [*charts.rates(summary), *charts.every_rate(summary)],
        "Variance": charts.variances(summary),
    }
    for name, drawings in sections.items():
        if drawings:
            body += [f"<h2>{name}</h2>", html.charts(drawings, large=True)]
    body += [_settings(summary), _runs(summary)]
    path = folder / "compare.html"
    write_atomically(path, html.page(title, body))
    return path


def _headline(summary: Summary) -> str:
    """Say which variant ends highest, and how it compares with the reference."""
    ended = [outcome for outcome in summary.outcomes if outcome.final]
    best = max(ended, key=lambda outcome: outcome.final.value if outcome.final else 0.0)
    name = best.variant.name
    rate = f" at rate {best.rate:g}" if best.rate is not None else ""
    facts = [f"Highest final accuracy: <b>{text(name)}</b>{rate}, {interval(best.final)}"]
    test = summary.tests.get(name)
    if test is not None:
        p = summary.adjusted[name]
        seeds = f"{test.difference.n} seed{'s' if test.difference.n > 1 else ''}"
        adjusted = f", p {p_value(p)} adjusted" if p is not None else ""
        facts.append(f"{difference(test)} against {text(summary.spec.reference)} ({seeds}{adjusted})")
    if best.window:
        facts.append(f"usable rates {text(window(best.window))}")
    done = sum(result.state == "finished" for result in summary.results)
    facts.append(f"{done} of {summary.plan.count()} runs finished")
    return f"<p>{' &middot; '.join(facts)}</p>"


def _settings(summary: Summary) -> str:
    """Show what each variant changes, and what all share."""
    spec = summary.spec
    rows = []
    for v in spec.variants:
        changes = ", ".join(f"{key}: {value}" for key, value in v.settings.items()) or "nothing"
        rates = ", ".join(f"{rate:g}" for rate in v.learning_rates)
        rows.append([text(v.name), f"<code>{text(changes)}</code>", text(rates)])
    base = yaml_text(flatten(spec.base_config))
    seeds = ", ".join(map(str, spec.seeds))
    return (
        f"<h2>Settings</h2>{html.table(('variant', 'changes', 'rates'), rows)}<p>Seeds {seeds}.</p>"
        f"<details><summary>All base settings</summary><pre>{text(base)}</pre></details>"
    )


def _runs(summary: Summary) -> str:
    rows = []
    for r in summary.results:
        accuracy = "" if r.final is None else f"{r.final:.3f}"
        rows.append([text(r.variant), f"{r.rate:g}", str(r.seed), text(r.state), accuracy, text(r.why)])
    heads = ("variant", "rate", "seed", "state", "accuracy after", "")
    return f"<details><summary>All {len(rows)} runs</summary>{html.table(heads, rows)}</details>"
