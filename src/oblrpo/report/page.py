"""The page of a run, RUN/report.html: how it went, or is going, from what it left on the disk."""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from oblrpo.diagnosis import Diagnosis, Watch, facts_of, facts_of_log
from oblrpo.diagnosis.diagnosis import COMES_WITH, NOTES, WHAT_NEXT
from oblrpo.diagnosis.next_steps import Left
from oblrpo.errors import InputError
from oblrpo.report import curves
from oblrpo.report.charts import short
from oblrpo.report.html import TEMPLATES, markup, render
from oblrpo.report.record import LAST_STEPS, RunRecord, accuracy_margin, changed_settings, read_run, read_trl
from oblrpo.runs import Metrics, write_atomically
from oblrpo.settings import yaml_line
from oblrpo.tables.metrics import CHARTS, Chart

Rows = list[dict[str, Any]]
PROMPTS, COMPLETIONS = 3, 8  # the most prompts shown of a step, and the most completions of each
NARROW = 24  # completions of at most so many characters stand in a table beside their figures


def samples(record: RunRecord, chart: Chart) -> list[Markup]:
    """Show prompts of the first and the last step, and their completions."""
    kept = _first_and_last(record, "reward") or _first_and_last(record, "step")
    groups_of: dict[int, dict[str, Rows]] = {step: defaultdict(list) for step in kept}
    for step, rows in kept.items():
        for row in rows:
            groups_of[step][row["prompt"]].append(row)
    shared = set.intersection(*(set(groups) for groups in groups_of.values())) if kept else set()
    drawn = []
    for step, groups in groups_of.items():
        # those whose completions differ in reward first: the others teach nothing
        rewards = {prompt: {row["reward"] for row in rows} - {None} for prompt, rows in groups.items()}
        order = sorted(groups, key=lambda prompt: (prompt not in shared, len(rewards[prompt]) < 2))
        title = f"Step {step}, {'before' if step == min(kept) else 'after'}"
        shown = [_group(groups[prompt]) for prompt in order[:PROMPTS]]
        drawn.append(Markup(render("samples.html", title=title, groups=shown)))
    return drawn


def _group(rows: Rows) -> dict[str, Any]:
    shown = rows[:COMPLETIONS]
    parts: Any = TEMPLATES.get_template("parts.html").module
    return {
        "prompt": rows[0]["prompt"],
        "answer": str(rows[0].get("answer", "")),
        "narrow": max(len(row["completion"]) for row in shown) <= NARROW,
        "rows": [(parts.folded(row["completion"]), *_figures(row)) for row in shown],
        "more": len(rows) - COMPLETIONS,
    }


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a completion's reward, advantage, baseline, squared norm and length."""

    def number(key: str, missing: str, form: str = "") -> str:
        value = row.get(key)
        return missing if value is None else format(value, form) if form else short(value)

    kind = "up" if (row["advantage"] or 0) > 0 else "down"
    advantage = markup("<span class={}>{}</span>", kind, number("advantage", "none", "+.3f"))
    baseline, norm2 = number("baseline", "none", ".3f"), number("score_norm2", "not taken")
    return number("reward", "masked", "g"), advantage, baseline, norm2, number("length", "", "d")


def _first_and_last(record: RunRecord, key: str) -> dict[int, Rows]:
    """Return the completions of the first and of the last step that have the metric and still have completions."""
    steps = [row["step"] for row in record.steps if row.get(key) is not None]
    ends = (
        next(((step, rows) for step in order if (rows := record.completions(step))), None)
        for order in (steps, steps[::-1])
    )
    return dict(filter(None, ends))


DRAWN: dict[str, Callable[[RunRecord, Chart], list[Markup]]] = {
    "course": curves.course,
    "reward": curves.reward,
    "n_snr": curves.n_snr,
    "rate": curves.rate,
    "critical_batch": curves.critical_batch,
    "length": curves.length,
    "variances": curves.variances,
    "variance_course": curves.variance_course,
    "samples": samples,
}
"""What draws a chart of each kind; nothing where the run has not what it shows."""


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
    sections: dict[str, list[Markup]] = {}
    for chart in CHARTS if record.steps else ():
        if drawings := DRAWN[chart.kind](record, chart):
            sections.setdefault(chart.section, []).extend(drawings)
    facts = facts_of_log(record.rows) if record.absent else facts_of(record.settings)
    left = Left(record.rows) if record.absent else Left(record.rows, record.settings, record.folder)
    page = render(
        "run.html",
        title=record.folder.path.resolve().name,
        reload_seconds=reload_seconds,
        state=_state(record, reload_seconds),
        facts=_facts(record),
        found=Diagnosis.of(Watch(facts).over(record.rows), record.folder.path.name, left),
        failure=record.failure,
        done=record.done,
        sections=sections,
        absent=record.absent,
        settings="" if record.absent else record.folder.config_file.read_text("utf-8"),
        changed=[
            [markup("<code>{}</code>", word) for word in (key, *map(yaml_line, pair))]
            for key, pair in changed_settings(record.settings).items()
        ],
        COMES_WITH=COMES_WITH,
        NOTES=NOTES,
        WHAT_NEXT=WHAT_NEXT,
    )
    write_atomically(path, page)
    return path


def _state(record: RunRecord, reload_seconds: int) -> list[str]:
    steps = record.settings.get("steps")
    parts = [record.settings.get("algorithm"), record.settings.get("model")]
    parts.append(record.settings.get("data") or record.settings.get("task"))
    words = [yaml_line(part) for part in parts if part]
    words.append(f"finished, {steps} steps" if record.finished else f"step {record.done} of {steps}")
    return [*words, *([f"live: this page reloads every {reload_seconds} s"] if reload_seconds else [])]


def _facts(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures that matter, each only where it is known: its name, the figure, and what stands behind it."""
    facts = []
    if record.measured:
        first, last = record.measured[0], record.measured[-1]
        value, behind = _accuracy(last), f"at step {last['step']}"
        if first is not last:
            value = f"{first['eval/accuracy']:.3f} → {last['eval/accuracy']:.3f}"
            behind = f"{_accuracy(first)} to {_accuracy(last)}"
        over = "" if accuracy_margin(last) is None else " (95 % interval over prompts)"
        facts.append(("Held-out accuracy", value, behind + over))
    before = record.rows[0].get("eval/accuracy_before_warm_start")
    if before is not None:
        facts.append(("Before warm start", f"{before:.3f}", "held-out accuracy of the model as it was loaded"))
    tail = record.steps[-LAST_STEPS:]
    rewards = [row["reward"] for row in tail if row["reward"] is not None]
    if rewards:
        facts.append(("Reward", f"{statistics.fmean(rewards):.3f}", f"mean of the last {len(rewards)} steps"))
    if tail:
        rates = [row.get("learning_rate") for row in tail if row.get("grad_norm") != 0 and "learning_rate" in row]
        if rates and rates[-1] is not None:
            schedule = f"of the last update, schedule {record.of_algorithm('schedule')}"
            facts.append(("Learning rate", short(rates[-1]), schedule))
        per_step = statistics.fmean(row.get("step_time") or 0.0 for row in tail)
        tokens = f"{short(tail[-1].get('num_tokens') or 0)} tokens trained on"
        facts.append(("Time", f"{per_step:.2f} s per step", tokens))
    return facts


def _accuracy(row: Metrics) -> str:
    margin = accuracy_margin(row)
    return f"{row['eval/accuracy']:.3f}" + ("" if margin is None else f" ± {margin:.3f}")


def follow(run: Path, output: Path, seconds: int, show: Callable[[str], None]) -> Path | None:
    """Write the page whenever the run's files have changed, until its last step, its failure or Ctrl-C.

    It returns the page's path, or None if the run never began. A run may be stopped, and resumed from an earlier step,
    meanwhile: the page shows what is there. A page of a run in progress asks the browser to reload it; the last one
    written does not.
    """
    record, seen = None, None
    show(f"following {run}; press Ctrl-C to stop")
    try:
        while True:
            if not run.is_dir():
                raise InputError(f"{run} is not a folder; give the folder of a run that has been started.")
            now = _signature(run)
            if now != seen:
                record, seen = _render(run, output, seconds, show) or record, now
            if record is not None and record.ended:
                return output
            time.sleep(seconds)
    except KeyboardInterrupt:
        return write_record(record, output) if record is not None else None


def _render(run: Path, output: Path, seconds: int, show: Callable[[str], None]) -> RunRecord | None:
    record = read_run(run)
    if record is None:
        show("no finished step yet")
        return None
    write_record(record, output, 0 if record.ended else seconds)
    reward = record.steps[-1]["reward"] if record.steps else None
    rewarded = "" if reward is None else f", reward {reward:.3f}"
    show(f"step {record.done} of {record.settings.get('steps')}{rewarded}")
    return record


def _signature(run: Path) -> tuple[object, ...]:
    """Return what changes whenever metrics, settings or a failure do: file, size, time of the last write."""

    def of(path: Path) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    return of(run / "metrics.jsonl"), of(run / "config.yaml"), of(run / "failure.txt")
