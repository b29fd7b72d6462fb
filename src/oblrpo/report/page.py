"""The page of a run, RUN/report.html: how it went, or goes, from what it left on the disk."""

from __future__ import annotations

import statistics
from pathlib import Path

from oblrpo.config import TrainConfig
from oblrpo.errors import InputError
from oblrpo.intervals import Z95
from oblrpo.report import completions, curves, html, ledger
from oblrpo.report.advice import advice
from oblrpo.report.charts import short
from oblrpo.report.html import text
from oblrpo.report.record import Record, read_run
from oblrpo.report.trl import read_trl
from oblrpo.runs import write_atomically
from oblrpo.settings import flatten
from oblrpo.yaml_files import yaml_line

LAST = 20
"""Steps over which the figures at the end are averaged."""


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run, ours or of TRL, into its folder if no file is given, and return its path.

    Raises:
        InputError: the folder holds no metrics, or a file is damaged.
    """
    record = read_run(run) or read_trl(run)
    if record is None:
        raise InputError(
            f"{run} holds no config.yaml and metrics.jsonl with a finished step, nor a trainer_state.json of TRL; give "
            "the folder of a run."
        )
    return write_record(record, output or run / "report.html")


def write_record(record: Record, path: Path, reload_seconds: int = 0) -> Path:
    """Write the page of a record. A browser reads it anew every `reload_seconds`, unless 0."""
    sections = {
        "Learning": html.charts(curves.learning(record), large=True) if record.steps else "",
        "Noise and learning rate": html.charts(curves.noise(record), large=True) if record.steps else "",
        "Variance under each baseline": html.charts(ledger.charts(record), large=True),
        "What was trained on": html.charts(curves.selection(record), large=True),
        "Score norms": html.charts([*curves.norms(record), *completions.norm_against_reward(record)], large=True),
        "Completions": html.charts([*curves.lengths(record), *completions.lengths(record)], large=True)
        if record.steps
        else "",
        "Samples": completions.samples(record),
        "More": html.charts(curves.further(record), large=True),
        "Settings": "" if record.absent else _settings(record),
        "What is not here": _absent(record),
    }
    shown = {name: body for name, body in sections.items() if "<svg" in body or "<table" in body}
    links = " ".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in shown)
    name = record.folder.path.resolve().name
    body = [f"<h1>{text(name)}</h1>", _state(record, reload_seconds), _facts(record), f"<nav>{links}</nav>"]
    body += [_warnings(record), *(f"<h2 id={_anchor(name)}>{name}</h2>{part}" for name, part in shown.items())]
    write_atomically(path, html.page(name, body, reload_seconds))
    return path


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _state(record: Record, reload_seconds: int) -> str:
    steps = record.settings.get("steps")
    told = f"finished, {steps} steps" if record.finished else f"step {record.done} of {steps}"
    told_of = [record.settings.get(key) for key in ("algorithm", "model", "data")]
    about = " · ".join(
        text(yaml_line(each)) for each in [*told_of, *([] if told_of[-1] else [record.settings.get("task")])] if each
    )
    live = f" · live: this page is read anew every {reload_seconds} s" if reload_seconds else ""
    return f"<p><small>{about} · {told}{live}</small></p>"


def _facts(record: Record) -> str:
    """Show the figures that matter, each only where it is known."""
    facts: dict[str, tuple[str, str]] = {}
    if record.measured:
        first, last = record.measured[0], record.measured[-1]
        ends = [_with_interval(row) for row in (first, last)]
        value = f"{first['eval/accuracy']:.3f} &rarr; {last['eval/accuracy']:.3f}" if first is not last else ends[0]
        known = " (95 % interval over prompts)" if "&plusmn;" in ends[-1] else ""
        facts["Held-out accuracy"] = (value, f"{ends[0]} to {ends[-1]}{known}")
    before = record.rows[0].get("eval/accuracy_before_warm_start") if record.rows else None
    if before is not None:
        facts["Before supervised learning"] = (f"{before:.3f}", "held-out accuracy of the model as it was loaded")
    tail = record.steps[-LAST:]
    rewards = [row["reward"] for row in tail if row["reward"] is not None]
    if rewards:
        facts["Reward"] = (f"{statistics.fmean(rewards):.3f}", f"mean of the last {len(rewards)} steps")
    if tail:
        facts |= _of_last(record, {key: value for row in tail for key, value in row.items()})
        per_step = statistics.fmean(row.get("step_time") or 0.0 for row in tail)
        facts["Time"] = (f"{per_step:.2f} s a step", f"{short(tail[-1].get('num_tokens') or 0)} tokens trained on")
    return html.facts(facts)


def _with_interval(row: dict[str, float]) -> str:
    margin = row.get("eval/accuracy_stderr")
    return f"{row['eval/accuracy']:.3f}" + ("" if margin is None else f" &plusmn; {Z95 * margin:.3f}")


def _of_last(record: Record, last: dict[str, float | None]) -> dict[str, tuple[str, str]]:
    n_snr, critical, rate = last.get("n_snr"), last.get("critical_batch_size"), last.get("learning_rate")
    facts = {}
    if n_snr is not None and record.prompts:
        told = text(advice(record.prompts, n_snr))
        value = f"{critical:.0f} prompts" if critical else "none found"
        facts["Critical batch size"] = (value, told[0].upper() + told[1:])
    if rate is not None:
        facts["Learning rate"] = (short(rate), f"of the last step, schedule {text(record.schedule)}")
    return facts


def _warnings(record: Record) -> str:
    found = [(row["step"], told) for row in record.rows for told in row.get("warnings") or ()]
    if record.failure:
        found.append((record.done, f"the last that was done. The run then failed: {record.failure}"))
    if not found:
        if record.absent:
            return "<p><small>Nothing was watched: warnings are of `oblrpo train`.</small></p>"
        return "<p><small>No warnings: rates, rewards, baselines and sampler were watched at every step.</small></p>"
    alarms = "".join(f"<div class=alarm><b>Step {step}</b>: {text(str(told))}</div>" for step, told in found)
    return f"<h2 id=warnings>Warnings</h2>{alarms}"


def _absent(record: Record) -> str:
    """Say what a run of another trainer has not left."""
    return html.table(("missing", "how to have it"), [[text(each) for each in pair] for pair in record.absent.items()])


def _settings(record: Record) -> str:
    """Show what differs from the defaults, and everything as it was resolved."""
    usual = flatten(TrainConfig())
    changed = [
        [f"<code>{text(word)}</code>" for word in (key, yaml_line(value), yaml_line(usual[key]))]
        for key, value in record.settings.items()
        if key in usual and value != usual[key]
    ]
    whole = text(record.folder.config_file.read_text("utf-8"))
    return (
        html.table(("changed", "here", "default"), changed)
        + f"<details><summary>All settings, as in config.yaml</summary><pre>{whole}</pre></details>"
    )
