"""OUTPUT/compare.html: the whole comparison on one page."""

from pathlib import Path

from oblrpo.compare import charts
from oblrpo.compare.summary import Outcome, Summary
from oblrpo.compare.table import difference, interval, lines, notes, p_value, window
from oblrpo.report.html import markup, render
from oblrpo.runs import write_atomically
from oblrpo.settings import flatten, yaml_text

CURVES = (
    "Bands of curves: 95 % by Student's t over seeds; with two seeds, their range. A curve ends where the first of its "
    "runs does. Bars against learning rate: lowest and highest seed."
)


def write_page(summary: Summary, folder: Path) -> Path:
    """Write `compare.html` and return its path."""
    spec = summary.spec
    best = max(summary.outcomes, key=lambda outcome: outcome.final.value if outcome.final else float("-inf"))
    table = lines(summary)
    # A figure may break before a bracket and after the commas within it, and nowhere else.
    cells = [
        [cell.replace(" ", "\xa0").replace("\xa0(", " (").replace(",\xa0", ", ") for cell in line.values()]
        for line in table
    ]
    variants = []
    for v in spec.variants:
        changes = ", ".join(f"{key}: {value}" for key, value in v.settings.items()) or "nothing"
        rates = ", ".join(f"{rate:g}" for rate in v.learning_rates)
        variants.append((v.name, markup("<code>{}</code>", changes), rates))
    page = render(
        "comparison.html",
        reload_seconds=0,
        title=spec.name.removesuffix(".yaml"),
        spec=spec,
        best=best,
        facts=_facts(summary, best),
        heads=list(table[0]),
        lines=cells,
        notes=[*notes(summary), CURVES],
        sections={
            "Learning": [*charts.learning(summary), *charts.completions(summary), *charts.differences(summary)],
            "Learning rates": [*charts.rates(summary), *charts.every_rate(summary)],
            "Variance": charts.variances(summary),
        },
        variants=variants,
        base=yaml_text(flatten(spec.base_config)),
        runs=[
            (r.run.variant, f"{r.rate:g}", r.seed, r.state, "" if r.final is None else f"{r.final:.3f}", r.why)
            for r in summary.results
        ],
    )
    path = folder / "compare.html"
    write_atomically(path, page)
    return path


def _facts(summary: Summary, best: Outcome) -> list[str]:
    """Say where the variant that ends highest ends, and how it compares with the reference."""
    facts, name = [interval(best.final)], best.variant.name
    if test := summary.tests.get(name):
        p = test.adjusted
        seeds = f"{test.difference.n} seed{'s' if test.difference.n > 1 else ''}"
        adjusted = f", p {p_value(p)} adjusted" if p is not None else ""
        facts.append(f"{difference(test)} against {summary.spec.reference} ({seeds}{adjusted})")
    if best.window:
        facts.append(f"usable rates {window(best.window)}")
    done = sum(result.state == "finished" for result in summary.results)
    return [*facts, f"{done} of {summary.plan.count()} runs finished"]
