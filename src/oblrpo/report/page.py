"""The page of a run, RUN/report.html: how it went, or is going, from what it left on the disk."""

import statistics
from pathlib import Path

from oblrpo.diagnosis import Diagnosis, Finding, Watch, facts_of, facts_of_log
from oblrpo.diagnosis.diagnosis import COMES_WITH, NOTES
from oblrpo.errors import InputError
from oblrpo.intervals import Z95
from oblrpo.report import completions, curves, html, ledger
from oblrpo.report.advice import advice
from oblrpo.report.charts import short
from oblrpo.report.html import text
from oblrpo.report.record import RunRecord, read_run
from oblrpo.report.trl import read_trl
from oblrpo.runs import write_atomically
from oblrpo.settings import TrainConfig, flatten, yaml_line

LAST = 20  # steps over which the figures at the end are averaged


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run, ours or of TRL, into its folder if no file is given, and return its path."""
    record = read_run(run) or read_trl(run)
    if record is None:
        raise InputError(
            f"{run} holds no config.yaml and metrics.jsonl with a finished step, nor a trainer_state.json of TRL; give "
            "the folder of a run."
        )
    return write_record(record, output or run / "report.html")


def write_record(record: RunRecord, path: Path, reload_seconds: int = 0) -> Path:
    """Write the page of a record. A browser reloads it every `reload_seconds`, unless 0."""
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
        "What is missing": _absent(record),
    }
    shown = {name: body for name, body in sections.items() if body}
    anchors = {name: name.lower().replace(" ", "-") for name in shown}
    links = " ".join(f'<a href="#{anchor}">{name}</a>' for name, anchor in anchors.items())
    title = record.folder.path.resolve().name
    body = [f"<h1>{text(title)}</h1>", _state(record, reload_seconds), _facts(record), f"<nav>{links}</nav>"]
    body += [_diagnosis(record), *(f"<h2 id={anchors[name]}>{name}</h2>{part}" for name, part in shown.items())]
    write_atomically(path, html.page(title, body, reload_seconds))
    return path


def _state(record: RunRecord, reload_seconds: int) -> str:
    steps = record.settings.get("steps")
    parts = [record.settings.get("algorithm"), record.settings.get("model")]
    parts.append(record.settings.get("data") or record.settings.get("task"))
    words = [text(yaml_line(part)) for part in parts if part]
    words.append(f"finished, {steps} steps" if record.finished else f"step {record.done} of {steps}")
    if reload_seconds:
        words.append(f"live: this page reloads every {reload_seconds} s")
    return f"<p><small>{' · '.join(words)}</small></p>"


def _facts(record: RunRecord) -> str:
    """Show the figures that matter, each only where it is known."""
    facts: dict[str, tuple[str, str]] = {}
    if record.measured:
        first, last = record.measured[0], record.measured[-1]
        errors = [row.get("eval/accuracy_stderr") for row in (first, last)]
        ends = [
            f"{row['eval/accuracy']:.3f}" + ("" if error is None else f" &plusmn; {Z95 * error:.3f}")
            for row, error in zip((first, last), errors, strict=True)
        ]
        value = f"{first['eval/accuracy']:.3f} &rarr; {last['eval/accuracy']:.3f}" if first is not last else ends[0]
        over = " (95 % interval over prompts)" if "&plusmn;" in ends[-1] else ""
        course = f"{ends[0]} to {ends[-1]}" if first is not last else f"at step {first['step']}"
        facts["Held-out accuracy"] = (value, f"{course}{over}")
    before = record.rows[0].get("eval/accuracy_before_warm_start") if record.rows else None
    if before is not None:
        facts["Before warm start"] = (f"{before:.3f}", "held-out accuracy of the model as it was loaded")
    tail = record.steps[-LAST:]
    rewards = [row["reward"] for row in tail if row["reward"] is not None]
    if rewards:
        facts["Reward"] = (f"{statistics.fmean(rewards):.3f}", f"mean of the last {len(rewards)} steps")
    if tail:
        if sentence := advice(record.prompts, tail):
            facts["Batch size"] = (f"{record.prompts} prompts", f"{sentence}.")
        rates = [row.get("learning_rate") for row in tail if row.get("grad_norm") != 0 and "learning_rate" in row]
        if rates and rates[-1] is not None:
            schedule = text(record.of_algorithm("schedule"))
            facts["Learning rate"] = (short(rates[-1]), f"of the last update, schedule {schedule}")
        per_step = statistics.fmean(row.get("step_time") or 0.0 for row in tail)
        facts["Time"] = (f"{per_step:.2f} s per step", f"{short(tail[-1].get('num_tokens') or 0)} tokens trained on")
    return html.facts(facts)


def _diagnosis(record: RunRecord) -> str:
    """Show what is wrong with the run, worst first, and notes."""
    facts = facts_of_log(record.rows) if record.absent else facts_of(record.settings)
    found = Diagnosis.of(Watch(facts).over(record.rows), record.folder.path.name)
    parts = [
        f"<div class=alarm><b>{text(finding.name)}, {text(finding.when)}.</b> {text(finding.sentence)} "
        f"{text(finding.cure)} <small>{text(finding.sure.capitalize())}.</small>{_follows(finding)}</div>"
        for finding in found.findings
    ]
    if record.failure:
        parts.insert(0, f"<div class=alarm><b>Failed after step {record.done}.</b> {text(record.failure)}</div>")
    notes = [f"<li>{text(note.name)}, {text(note.when)}. {text(str(note))}</li>" for note in found.notes]
    parts += [f"<small>{NOTES}:<ul>{''.join(notes)}</ul></small>"] if notes else []
    if not found.findings and not record.failure:
        parts.insert(0, f"<p><small>{found.verdict} {found.looked}.</small></p>")
        return "".join(parts)
    return f"<h2 id=diagnosis>Diagnosis</h2>{''.join(parts)}"


def _follows(finding: Finding) -> str:
    """Show what follows from what is wrong."""
    points = [f"<li>{text(each.name)}, {text(each.when)}. {text(each.sentence)}</li>" for each in finding.follows]
    return f"<br>{COMES_WITH}:<ul>{''.join(points)}</ul>" if points else ""


def _absent(record: RunRecord) -> str:
    """Show what the log of another trainer lacks."""
    rows = [[text(word) for word in pair] for pair in record.absent.items()]
    return html.table(("missing", "how to get it"), rows) if rows else ""


def _settings(record: RunRecord) -> str:
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
