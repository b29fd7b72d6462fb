"""The comparison as a table on the console and on one page, and every run as a line of a CSV file."""

import csv
import io
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oblrpo.compare import charts
from oblrpo.compare.summary import Outcome, Summary, Window
from oblrpo.intervals import GeometricMean, Mean
from oblrpo.report.html import markup, render, seen
from oblrpo.report.record import LAST_STEPS
from oblrpo.runs import write_atomically
from oblrpo.settings import flatten, yaml_text
from oblrpo.tables.baselines import COMPARED

# The columns of the console, and their shorter names there, where what stands in brackets is left out.
NARROW = {"variant": "", "rate": "", "accuracy after": "after", "difference": "", "p adjusted": "p",
          "completions to target": "to target", "over reference's": "over", "usable rates": "usable",
          "seeds": ""}  # fmt: skip


def print_table(summary: Summary, console: Console) -> None:
    """Print one line a variant, then what stands behind the figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, short in NARROW.items():
        table.add_column(short or name, justify="left" if name == "variant" else "right", no_wrap=name == "rate")
    for line in lines(summary):
        table.add_row(*(line[name] if name == "variant" else line[name].partition(" (")[0] for name in NARROW))
    console.print()
    console.print(table)
    for note in notes(summary):
        console.print(seen(note), highlight=False)


def lines(summary: Summary) -> list[dict[str, str]]:
    """Return one line a variant, its cells by the names of their columns, as plain text."""
    rows = []
    for outcome in summary.outcomes:
        name, finals = outcome.variant.name, outcome.finals
        is_reference, test = outcome is summary.reference, summary.tests.get(outcome.variant.name)
        fell = f" ({outcome.fallen} fell)" if outcome.fallen else ""
        over = None if is_reference else outcome.completions_over(summary.reference)
        rows.append({
            "variant": name,
            "accuracy after": interval(outcome.final),
            "difference": "reference" if is_reference else interval(test.difference if test else None, "+"),
            "p": p_value(test.p) if test else "",
            "p adjusted": p_value(test.adjusted) if test else "",
            "completions to target": reached(outcome),
            "over reference's": factor(over),
            "rate": "" if outcome.rate is None else f"{outcome.rate:g}",
            "usable rates": window(outcome.window),
            "before": interval(outcome.before),
            "lowest": f"{min(finals.values()):.3f}{fell}" if finals else "",
            "seeds": f"{len(finals)}/{len(summary.spec.seeds)}",
        })  # fmt: skip
    return rows


def notes(summary: Summary) -> list[str]:
    """Say what the figures mean, in the order of the columns, and what is missing from them."""
    spec, plan = summary.spec, summary.plan
    searched = [variant for variant in spec.variants if len(variant.learning_rates) > 1]
    text = render(
        "comparison_notes.txt",
        summary=summary,
        spec=spec,
        runs=plan.count(),
        several_rates=bool(searched),
        measured_at_ends=all(result.measured_at_its_ends for result in summary.results),
        reached_seeds=max((len(outcome.completions) for outcome in summary.outcomes), default=0),
        diverged=[o for o in summary.outcomes if all(result.state == "diverged" for result in o.results)],
        ended=[result for result in summary.results if result.state not in {"part", "none"}],
        without_rate=[
            variant
            for variant in searched
            if all(run.is_done() for run in plan.search(variant)) and plan.best_rate(variant) is None
        ],
        LAST_STEPS=LAST_STEPS,
    )
    return text.splitlines()


def interval(mean: Mean | None, sign: str = "") -> str:
    """Write a mean and its margin."""
    if mean is None:
        return ""
    return format(mean.value, f"{sign}.3f") + ("" if mean.margin is None else f" ± {mean.margin:.3f}")


def p_value(p: float | None) -> str:
    """Write a p value with three decimals."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def reached(outcome: Outcome) -> str:
    """Write the median, the seeds' range, how many reached the target, and how many started there."""
    median, values = outcome.median_completions, outcome.completions.values()
    if median is None:
        return ""
    arrived, began = sum(map(math.isfinite, values)), sum(map(outcome.began_there, outcome.completions))
    last = f"{max(values):,.0f}" if arrived == len(values) else "never"
    parts = [f"{min(values):,.0f} to {last}"] if arrived > 1 else []
    parts += [f"{arrived} of {len(values)} reached it"] if arrived < len(values) else []
    parts += [f"{began} started there"] if began else []
    return ("not reached" if math.isinf(median) else f"{median:,.0f}") + (f" ({', '.join(parts)})" if parts else "")


def factor(ratio: GeometricMean | None) -> str:
    """Write a geometric mean and its interval."""
    if ratio is None:
        return ""
    return f"{ratio.value:.2f}" + (f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.n > 1 else "")


def window(rates: Window | None) -> str:
    """Write a window's ends and their ratio; a ~ stands where the grid ends first."""
    if rates is None:
        return ""
    low, high = "~" * rates.open_low + f"{rates.low:.2g}", f"{rates.high:.2g}" + "~" * rates.open_high
    return f"{low} to {high} (x{rates.high / rates.low:.2g})"


def write_table(summary: Summary, folder: Path) -> Path:
    """Write `compare.csv`, a line a run, and return its path."""
    rows = []
    for result in summary.results:
        steps = result.rows[-1]["step"] if result.rows else 0
        completions = result.completions_to(summary.level, summary.spec.target)
        ratios = {f"variance_{name}_over_rloo": _csv(result.variance_ratio(name)) for name in COMPARED}
        rows.append({
            "variant": result.run.variant,
            "learning_rate": repr(result.rate),
            "seed": result.seed,
            "state": result.state,
            "why": result.why,
            "steps": steps,
            "completions": steps * result.per_step,
            "accuracy_before": _csv(result.before),
            "accuracy_after": _csv(result.final),
            f"reward_last_{LAST_STEPS}_steps": _csv(result.last_reward()),
            "completions_to_target": "not reached" if completions == math.inf else _csv(completions, ".0f"),
            "seconds_in_steps": _csv(sum(row.get("step_time", 0.0) for row in result.rows), ".1f"),
            **ratios,
            "folder": result.run.place,
        })  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = folder / "compare.csv"
    write_atomically(path, text.getvalue())
    return path


def _csv(number: float | None, form: str = ".6g") -> str:
    return "" if number is None else format(number, form)


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
            "Learning": charts.learning(summary),
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
        facts.append(f"{interval(test.difference, '+')} against {summary.spec.reference} ({seeds}{adjusted})")
    if best.window:
        facts.append(f"usable rates {window(best.window)}")
    done = sum(result.state == "finished" for result in summary.results)
    return [*facts, f"{done} of {summary.plan.count()} runs finished"]
