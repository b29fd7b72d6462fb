"""RUN/report.html: how the run went, from what it left on the disk; no network, no scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.report.charts import Line, chart
from oblrpo.report.html import charts, page, table, text
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
    body = [f"<h1>{text(run.name)}</h1>", _headline(rows)]
    warnings = [f"<li>step {row['step']}: {text(told)}" for row in rows for told in row.get("warnings", ())]
    if warnings:
        body.append(f"<h2>Warnings</h2><ul>{''.join(warnings)}</ul>")
    if steps:
        body.append(charts(_charts(rows, steps)))
        body += [_samples(folder, "First step", steps[0]["step"]), _samples(folder, "Last step", steps[-1]["step"])]
    body.append(f"<h2>Settings</h2><pre>{text(folder.config_file.read_text('utf-8'))}</pre>")
    path = run / "report.html"
    write_atomically(path, page(run.name, body))
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
    cells = [
        [f"<code>{text(row['prompt'])}</code>", f"<code>{text(row['completion'])}</code>",
         _number(row["reward"], "masked", "g"), _number(row["baseline"], "none", ".3f"),
         _number(row["advantage"], "none", "+.3f"), _number(row.get("score_norm2"), "not taken", ".3g")]
        for row in rows
    ]  # fmt: skip
    heads = ("prompt", "completion", "reward", "baseline", "advantage", "score norm&sup2;")
    return f"<h2>{title}: completions of one prompt of step {step}</h2>{table(heads, cells)}"


def _number(value: float | None, missing: str, form: str) -> str:
    return missing if value is None else format(value, form)
