"""`python -m lab.theory --output FILE`: every statement and the plots, on one page."""

from __future__ import annotations

from pathlib import Path

from lab.theory.claims import Measurement
from lab.theory.console import figures, with_margin
from lab.theory.suite import Findings
from oblrpo.report.charts import Line, chart
from oblrpo.report.html import charts, page, table, text
from oblrpo.runs import write_atomically

INTRO = """<h1>The theory of OBLR-PO, computed</h1>
<p>Policies small enough to list every output of every prompt, in float64: softmax bandits, token trees and a small
transformer. Each line compares what is stated with what comes out; the verdict is computed. Where it says <i>does not
hold</i>, the line is a counterexample. Of = the slack is the relative difference. What was sampled has its interval,
four standard errors to each side.</p>"""


def write_page(findings: Findings, path: Path, seconds: float) -> None:
    """Write the page: the table with notes, the decay of the squared gradient, predicted and realised improvement."""
    heads = ("result", "source", "claimed", "computed", "slack", "verdict", "where")
    rows = [
        [text(claim.result), text(claim.source), *map(text, figures(claim)),
         claim.verdict if claim.holds else f"<b>{claim.verdict}</b>", text(claim.note)]
        for claim in findings.claims
    ]  # fmt: skip
    body = [
        INTRO,
        table(heads, rows),
        "<h2>Theorems 5 and 6: mean squared gradient norm over the first T steps</h2>",
        charts(_decay(findings)),
        _reached(findings),
        "<h2>Theorem 3, step by step: improvement predicted by the bound, and realised</h2>",
        charts(_improvement(findings)),
        "<h2>Measured, nothing claimed</h2>",
        _measured(findings.measurements),
        f"<p>{len(findings.claims)} statements in {seconds:.0f} s.</p>",
    ]
    write_atomically(path, page("The theory of OBLR-PO, computed", body))


def _measured(measurements: list[Measurement]) -> str:
    rows = [
        [text(each.what), text(each.where), with_margin(each.value, each.margin), text(each.note)]
        for each in measurements
    ]
    return table(("what", "where", "value", "note"), rows)


def _decay(findings: Findings) -> list[str]:
    charts = []
    for slide, by_rate in findings.curves:
        lines = [Line(name, curve.times_K.tolist(), curve.norm2_RK.mean(0).tolist()) for name, curve in by_rate.items()]
        first = lines[0]
        start = first.y[0] or 0.0
        lines.append(Line("T^-1/2", first.x, [start * (t / first.x[0]) ** -0.5 for t in first.x]))
        charts.append(chart(f"{slide.name}: mean ||grad J||² by T", lines, logarithmic=True, xlabel="T", log_x=True))
    return charts


def _reached(findings: Findings) -> str:
    """A small gradient is not all: noise may have carried a fixed rate to another plateau, higher or lower."""
    parts = [
        f"{text(slide.name)}: "
        + ", ".join(f"{name} {float(curve.objective_R.mean()):.4f}" for name, curve in by_rate.items())
        for slide, by_rate in findings.curves
    ]
    return f"<p>Mean J after the last step. {'; '.join(parts)}.</p>"


def _improvement(findings: Findings) -> list[str]:
    return [
        chart(
            f"{world.name}: improvement of a step",
            [
                Line(label, list(range(1, len(values) + 1)), list(values))
                for label, values in (
                    ("promised by the bound", ascent.predicted),
                    ("second order, true Hessian", ascent.local),
                    ("realised", ascent.realised),
                )
            ],
        )
        for world, ascent in findings.ascents
    ]
