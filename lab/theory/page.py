"""`python -m lab.theory --output FILE`: every statement and the plots, on one page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from lab.theory.console import figures, with_margin
from lab.theory.suite import Findings
from oblrpo.report.charts import Line, chart
from oblrpo.report.html import TEMPLATES, markup
from oblrpo.runs import write_atomically

PAGE = """{% extends "page.html" %}
{% from "parts.html" import charts, table %}
{% block body %}
<h1>{{ title }}</h1>
<p>Policies small enough to list every output of every prompt, in float64: softmax bandits, token trees and a small
transformer. Each line compares what is stated with what comes out; the verdict is computed. Where it says <i>does not
hold</i>, the line is a counterexample. Of = the slack is the relative difference. What was sampled has its interval,
four standard errors to each side.</p>
{{ table(["result", "source", "claimed", "computed", "slack", "verdict", "where"], claims) }}
<h2>Theorems 5 and 6: mean squared gradient norm over the first T steps</h2>
{{ charts(decay) }}
<p>Mean J after the last step. {{ reached }}.</p>
<h2>Theorem 3, step by step: improvement predicted by the bound, and realised</h2>
{{ charts(improvement) }}
<h2>Measured, nothing claimed</h2>
{{ table(["what", "where", "value", "note"], measured) }}
<p>{{ claims | length }} statements in {{ seconds }} s.</p>
{% endblock %}
"""


def write_page(findings: Findings, path: Path, seconds: float) -> None:
    """Write the page: the table with notes, the decay of the squared gradient, predicted and realised improvement."""
    claims = [
        (claim.result, claim.source, *figures(claim),
         claim.verdict if claim.holds else markup("<b>{}</b>", claim.verdict), claim.note)
        for claim in findings.claims
    ]  # fmt: skip
    measured = [
        (each.what, each.where, with_margin(each.value, each.margin), each.note) for each in findings.measurements
    ]
    page = TEMPLATES.from_string(PAGE).render(
        title="The theory of OBLR-PO, computed", reload_seconds=0, claims=claims, decay=_decay(findings),
        reached=_reached(findings), improvement=_improvement(findings), measured=measured, seconds=f"{seconds:.0f}",
    )  # fmt: skip
    write_atomically(path, page)


def _decay(findings: Findings) -> list[Markup]:
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
        f"{slide.name}: "
        + ", ".join(f"{name} {float(curve.objective_R.mean()):.4f}" for name, curve in by_rate.items())
        for slide, by_rate in findings.curves
    ]
    return "; ".join(parts)


def _improvement(findings: Findings) -> list[Markup]:
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
