"""RUN/report.html: how the run went, from what it left on the disk; no network, no scripts."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.report.charts import Line, chart
from oblrpo.runs import RunFolder, write_atomically

LEDGER = ("none", "js", "oblr", "oblr_shrunk")
"""Baselines shown of the ledger, beside RLOO at 1."""

SAMPLES = 16
"""Most completions shown of a prompt."""


def write_report(run: Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Raises:
        InputError: the folder holds no metrics.
    """
    folder = RunFolder(run)
    rows = folder.read_metrics()
    if not rows or not folder.config_file.is_file():
        raise InputError(
            f"{run} holds no config.yaml and metrics.jsonl with a finished step; give the folder of a run."
        )
    steps = [row for row in rows if "reward" in row]
    body = [f"<h1>{_text(run.name)}</h1>", _headline(rows)]
    warnings = [f"<li>step {row['step']}: {_text(text)}" for row in rows for text in row.get("warnings", ())]
    if warnings:
        body.append(f"<h2>Warnings</h2><ul>{''.join(warnings)}</ul>")
    if steps:
        body += ["<div class=charts>", *_charts(rows, steps), "</div>"]
        body += [_samples(folder, "First step", steps[0]["step"]), _samples(folder, "Last step", steps[-1]["step"])]
    body.append(f"<h2>Settings</h2><pre>{_text(folder.config_file.read_text('utf-8'))}</pre>")
    path = run / "report.html"
    write_atomically(path, PAGE.format(title=_text(run.name), body="\n".join(body)))
    return path


def _headline(rows: list[dict[str, Any]]) -> str:
    measured = [row for row in rows if "eval/accuracy" in row]
    facts = [f"<b>{rows[-1]['step']}</b> steps"]
    if measured:
        ends = [f"{row['eval/accuracy']:.3f} &plusmn; {1.96 * row['eval/accuracy_stderr']:.3f}" for row in measured]
        facts.append(f"held-out accuracy <b>{ends[0]}</b> &rarr; <b>{ends[-1]}</b> (95 % interval over prompts)")
    critical = rows[-1].get("critical_batch_size")
    if critical is not None:
        facts.append(f"critical batch at the end <b>{critical:.0f}</b> prompts")
    return f"<p>{' &middot; '.join(facts)}</p>"


def _charts(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[str]:
    measured = [row for row in rows if "eval/accuracy" in row]

    def line(label: str, key: str, source: list[dict[str, Any]] = steps, error: str | None = None) -> Line:
        known = [row for row in source if key in row]
        return Line(
            label,
            [row["step"] for row in known],
            [row[key] for row in known],
            [1.96 * row[error] for row in known] if error else None,
        )

    accuracy = line("held-out accuracy (95 %)", "eval/accuracy", measured, "eval/accuracy_stderr")
    return [
        chart("Reward and held-out accuracy", [line("reward of the batch", "reward"), accuracy]),
        chart("Signal to noise of the batch gradient, N SNR", [line("N SNR (averaged)", "n_snr")]),
        chart("Learning rate used", [line("learning rate", "learning_rate")]),
        chart("Critical batch size, prompts", [line("critical batch size", "critical_batch_size")], logarithmic=True),
        chart("Squared score norm, mean", [line("score_norm2/mean", "score_norm2/mean")], logarithmic=True),
        chart("Completion length, tokens", [line("mean length", "completions/mean_length")]),
        *_ledger(steps),
    ]


def _ledger(steps: list[dict[str, Any]]) -> list[str]:
    """Variance that the gradient would have had with other baselines, over RLOO's."""
    taken = [row for row in steps if row.get("variance/rloo")]
    if not taken:
        return []
    lines = [
        Line(
            name,
            [row["step"] for row in taken],
            [row[f"variance/{name}"] / row["variance/rloo"] for row in taken],
            None,
        )
        for name in LEDGER
    ]
    return [chart("Gradient variance over RLOO's (unbiased baselines)", lines)]


def _samples(folder: RunFolder, title: str, step: int) -> str:
    rows = folder.read_completions(step)
    if not rows:
        return ""
    # one prompt whose completions differ in reward, where there is one: the others teach nothing
    rewards: dict[str, set[float]] = {}
    for row in rows:
        rewards.setdefault(row["prompt"], set()).update([] if row["reward"] is None else [row["reward"]])
    shown = next((row["prompt"] for row in rows if len(rewards[row["prompt"]]) > 1), rows[0]["prompt"])
    rows = [row for row in rows if row["prompt"] == shown][:SAMPLES]
    cells = "".join(
        f"<tr><td><code>{_text(row['prompt'])}</code><td><code>{_text(row['completion'])}</code>"
        f"<td>{_number(row['reward'], 'masked', 'g')}<td>{_number(row['baseline'], 'none', '.3f')}"
        f"<td>{_number(row['advantage'], 'none', '+.3f')}<td>{_number(row.get('score_norm2'), 'not taken', '.3g')}"
        for row in rows
    )
    heads = ("prompt", "completion", "reward", "baseline", "advantage", "score norm&sup2;")
    head = "".join(f"<th>{name}" for name in heads)
    return (
        f"<h2>{title}: completions of one prompt of step {step}</h2>"
        f"<div class=wide><table><tr>{head}{cells}</table></div>"
    )


def _number(value: float | None, missing: str, form: str) -> str:
    return missing if value is None else format(value, form)


def _text(text: str) -> str:
    return html.escape(text)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2433; --paper: #fff; --line: #d6dae3; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #dfe4ee; --paper: #14181f; --line: #39414f; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }}
.charts svg {{ width: 100%; height: auto; color: var(--ink); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
td, th {{ border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }}
code, pre {{ font-size: .85rem; overflow-wrap: anywhere; white-space: pre-wrap; }}
</style>
{body}
</html>
"""
