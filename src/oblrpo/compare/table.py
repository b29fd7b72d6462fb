"""The comparison as a table on the console, and every run as a line of a CSV file."""

import csv
import io
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oblrpo.compare.statistics import Paired, Window
from oblrpo.compare.summary import LAST, Outcome, Summary
from oblrpo.intervals import GeometricMean, Mean
from oblrpo.report.html import seen
from oblrpo.runs import write_atomically
from oblrpo.tables.baselines import COMPARED

COLUMNS = (
    "variant", "learning_rate", "seed", "state", "why", "steps", "completions", "accuracy_before", "accuracy_after",
    f"reward_last_{LAST}_steps", "completions_to_target", "seconds_in_steps",
)  # fmt: skip

HEADS = ("variant", "accuracy after", "difference", "p", "p adjusted", "completions to target", "over reference's",
         "rate", "usable rates", "before", "lowest", "seeds")  # fmt: skip

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
        cells = dict(zip(HEADS, line, strict=True))
        table.add_row(*(cells[name] if name == "variant" else cells[name].partition(" (")[0] for name in NARROW))
    console.print()
    console.print(table)
    for note in notes(summary):
        console.print(seen(note), highlight=False)


def lines(summary: Summary) -> list[list[str]]:
    """Return one line a variant, its cells in the order of `HEADS`, as plain text."""
    rows = []
    for outcome in summary.outcomes:
        name, finals = outcome.variant.name, outcome.finals
        is_reference, test = outcome is summary.reference, summary.tests.get(outcome.variant.name)
        fell = f" ({outcome.fallen} fell)" if outcome.fallen else ""
        rows.append([
            name,
            interval(outcome.final),
            "reference" if is_reference else difference(test),
            p_value(test.p) if test else "",
            p_value(summary.adjusted[name]) if test else "",
            reached(outcome),
            "" if is_reference else factor(outcome.completions_over(summary.reference)),
            "" if outcome.rate is None else f"{outcome.rate:g}",
            window(outcome.window),
            interval(outcome.before),
            f"{min(finals.values()):.3f}{fell}" if finals else "",
            f"{len(finals)}/{len(summary.spec.seeds)}",
        ])  # fmt: skip
    return rows


def notes(summary: Summary) -> list[str]:
    """Say what the figures mean, in the order of the columns, and what is missing from them."""
    spec = summary.spec
    sentences = [
        "Intervals are 95 % by Student's t over seeds. Differences are to the reference, seed by seed; p is from the "
        "paired t test, adjusted for the number of variants by Holm's method.",
        *_of_target(summary),
        "Usable rates: those around the best with at least 90 % of its final accuracy; an end marked with ~ is that of "
        "the grid, and the window may extend further.",
    ]
    if spec.search_seeds and any(len(v.learning_rates) > 1 for v in spec.variants):
        sentences.append(
            f"Rates were chosen on the first {spec.search_seeds} of the {len(spec.seeds)} seeds, which also count "
            "in the results at the best rate: these are slightly optimistic where rates differ little."
        )
    elif any(len(v.learning_rates) > 1 for v in spec.variants):
        sentences.append(
            "Each rate was chosen on the same seeds it is reported on: slightly optimistic where rates differ little."
        )
    return [*sentences, *_of_diverged(summary), *_of_missing(summary)]


def _of_diverged(summary: Summary) -> list[str]:
    """Say what diverged runs count with, and which variants have no others."""
    if not any(result.state == "diverged" for result in summary.results):
        return []
    lowest = ", the lowest that any run measured" if summary.floor < 0 else ""
    note = (
        f"A run that diverged counts with accuracy {summary.floor:.3g}{lowest}. A rate at which fewer runs diverge is "
        "always preferred."
    )
    wild = [o.variant.name for o in summary.outcomes if all(result.state == "diverged" for result in o.results)]
    return [note, *(f"{name}: every run diverged, at every rate; lower the rates." for name in wild)]


def _of_missing(summary: Summary) -> list[str]:
    """Name the runs without a result, and say why they have none."""
    plan, ended = summary.plan, [result for result in summary.results if result.state not in {"part", "none"}]
    sentences = [f"{r.run.name}: {r.state}: {r.why}" for r in ended if r.state != "finished"]
    for variant in summary.spec.variants:
        several = len(variant.learning_rates) > 1
        if several and all(run.settled() for run in plan.search(variant)) and plan.best_rate(variant) is None:
            sentences.append(f"{variant.name}: no rate has an accuracy on every seed that chooses, so none was chosen.")
    if missing := plan.count() - len(ended):
        sentences.append(f"{missing} of {plan.count()} runs have not ended yet; run the same command to continue.")
    return sentences


def _of_target(summary: Summary) -> list[str]:
    """Say what the target is and what is shown of the way there, or why nothing is."""
    target = summary.spec.target
    curve = "held-out accuracy" if target.curve == "accuracy" else "batch reward"
    best = "best final accuracy" if target.curve == "accuracy" else f"best reward of the last {LAST} steps"
    share = f"{target.of_best:g} of the {best}" if target.of_best is not None else "as given"
    if target.of_gain is not None:
        share = f"{target.of_gain:g} of the way from where runs start to the {best}"
    if summary.level is None:
        return [
            f"Target: {share}. There is none: it would not lie above where runs start, or no variant's {curve} ends "
            "above 0. For a share of the way from there set `--target '{of_gain: 0.8}'`."
        ]
    note = f"Target: {summary.level:.3f}, {share}"
    if target.curve == "accuracy" and all(result.measured_at_its_ends for result in summary.results):
        return [note + ". Completions to it are not known: accuracy was measured at the ends of runs only; set "
                "eval_steps, or target: {curve: reward}."]  # fmt: skip
    note += f". Completions to it: the median over seeds until {curve}, averaged over {target.window} points, is there"
    n = max((len(outcome.completions) for outcome in summary.outcomes), default=0)
    note += f", with the range of {n} seeds, a {1 - 0.5 ** (n - 1):.0%} interval for the median." if n > 2 else "."
    over = "Over the reference's: geometric mean of the seeds' ratios, not adjusted for the number of variants"
    blank = "; blank where a seed never reaches the target or starts there."
    return [
        note,
        over + (blank if summary.reference.all_arrive else ". Blank: not all seeds of the reference reach it."),
    ]


def interval(mean: Mean | None) -> str:
    """Write a mean and its margin."""
    if mean is None:
        return ""
    return f"{mean.value:.3f}" + ("" if mean.margin is None else f" ± {mean.margin:.3f}")


def difference(test: Paired | None) -> str:
    """Write a mean difference and its margin."""
    return "" if test is None else f"{'+' if test.difference.value >= 0 else ''}{interval(test.difference)}"


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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"variance_{name}_over_rloo" for name in COMPARED), "folder"])
    for result in summary.results:
        steps, completions = result.rows[-1]["step"] if result.rows else 0, None
        if summary.level is not None:
            completions = result.completions_to(summary.level, summary.spec.target)
        numbers = [result.before, result.final, result.last_reward(), *map(result.variance_ratio, COMPARED)]
        before, final, reward, *ratios = ("" if number is None else f"{number:.6g}" for number in numbers)
        writer.writerow([
            result.variant, repr(result.rate), result.seed, result.state, result.why, steps, steps * result.per_step,
            before, final, reward,
            "" if completions is None else "not reached" if math.isinf(completions) else f"{completions:.0f}",
            f"{sum(row.get('step_time', 0.0) for row in result.rows):.1f}",
            *ratios, result.run.place,
        ])  # fmt: skip
    path = folder / "compare.csv"
    write_atomically(path, text.getvalue())
    return path
