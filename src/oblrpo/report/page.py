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
from oblrpo.objects import plain_name
from oblrpo.report import curves
from oblrpo.report.charts import short
from oblrpo.report.html import TEMPLATES, markup, render, with_code
from oblrpo.report.record import (
    LAST_STEPS,
    RunRecord,
    accuracy,
    accuracy_margin,
    before_and_after,
    changed_settings,
    critical_batch,
    of_last,
    read_any,
    read_run,
    reward_of,
)
from oblrpo.runs import write_atomically
from oblrpo.settings import yaml_line
from oblrpo.tables.metrics import CHARTS, Chart

Rows = list[dict[str, Any]]
PROMPTS, COMPLETIONS = 3, 8  # the most prompts shown of a step, and the most completions of each
NARROW = 24  # completions of at most so many characters stand in a table beside their figures


def pairs(record: RunRecord, chart: Chart) -> list[Markup]:
    """Show held-out prompts, and what the policy said to them when they were first and last measured."""
    return pairs_of({"": record}, chart)


def pairs_of(records: Mapping[str, RunRecord], chart: Chart) -> list[Markup]:
    """Show before and after in each of these runs, those of a prompt beside one another; nothing where none has any."""
    asked: dict[str, dict[str, dict[str, Any]]] = {}
    for name, record in records.items():
        for pair in before_and_after(record.folder, record.measured):
            asked.setdefault(pair["prompt"], {})[name] = pair
    steps = {name: [row["step"] for row in record.measured] for name, record in records.items()}
    prompts = sorted(asked.items(), key=lambda each: -len(each[1]))  # those that most runs have first
    drawn = render("pairs.html", note=chart.note, prompts=prompts, steps=steps, reward_of=reward_of)
    return [Markup(drawn)] if prompts else []


def samples(record: RunRecord, chart: Chart) -> list[Markup]:
    """Show prompts of the last step that has completions, best one with rewards, and what each completion taught."""
    order = sorted(record.steps, key=lambda row: (row["reward"] is not None, row["step"]), reverse=True)
    step, rows = next(((row["step"], found) for row in order if (found := record.completions(row["step"]))), (0, []))
    groups = defaultdict[str, Rows](list)
    for row in rows:
        groups[row["prompt"]].append(row)
    # those whose completions differ in reward first: the others teach nothing
    differ = sorted(groups.values(), key=lambda group: len({row["reward"] for row in group} - {None}) < 2)
    shown = [_group(group) for group in differ[:PROMPTS]]
    return [Markup(render("samples.html", note=f"Step {step}. {chart.note}", groups=shown))] if shown else []


def _group(rows: Rows) -> dict[str, Any]:
    shown = rows[:COMPLETIONS]
    parts: Any = TEMPLATES.get_template("parts.html").module
    return {
        "prompt": rows[0]["prompt"],
        "answer": str(rows[0].get("answer", "")),
        "narrow": all(len(row["completion"]) <= NARROW and "messages" not in row for row in shown),
        "rows": [(parts.said(row), *_figures(row)) for row in shown],
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
    return reward_of(row), advantage, baseline, norm2, number("length", "", "d")


DRAWN: dict[str, Callable[[RunRecord, Chart], list[Markup]]] = {
    "course": curves.course,
    "reward": curves.reward,
    "n_snr": curves.n_snr,
    "rate": curves.rate,
    "critical_batch": curves.critical_batch,
    "length": curves.length,
    "variances": curves.variances,
    "variance_course": curves.variance_course,
    "before_and_after": pairs,
    "samples": samples,
}
"""What draws a chart of each kind; nothing where the run has not what it shows."""


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run, ours or of TRL, into its folder if no file is given, and return its path."""
    return write_record(read_any(run), output or run / "report.html")


def write_record(record: RunRecord, path: Path, reload_seconds: int = 0) -> Path:
    """Write the page of a record. A browser reloads it every `reload_seconds`, unless 0."""
    sections: dict[str, list[Markup]] = {}
    for chart in CHARTS if record.steps else ():
        if drawings := DRAWN[chart.kind](record, chart):
            sections.setdefault(chart.section, []).extend(drawings)
    page = render(
        "run.html",
        title=record.folder.path.resolve().name,
        reload_seconds=reload_seconds,
        about=with_code(record.about),
        state=_state(record, reload_seconds),
        facts=facts_of_run(record),
        found=found_in(record),
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


def found_in(record: RunRecord) -> Diagnosis:
    """Return what is wrong with a run."""
    facts = facts_of_log(record.rows) if record.absent else facts_of(record.settings)
    left = Left(record.rows) if record.absent else Left(record.rows, record.settings, record.folder)
    return Diagnosis.of(Watch(facts).over(record.rows), record.folder.path.name, left)


def _state(record: RunRecord, reload_seconds: int) -> list[str]:
    steps = record.settings.get("steps")
    words = [plain_name(str(part)) for key in ("algorithm", "model") if (part := record.settings.get(key))]
    words.append(f"finished, {steps} step{'s' * (steps != 1)}" if record.finished else f"step {record.done} of {steps}")
    return [*words, *([f"live: this page reloads every {reload_seconds} s"] if reload_seconds else [])]


def facts_of_run(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures that matter, each only where it is known: its name, the figure, and what stands behind it."""
    facts = []
    if record.measured:
        first, last = record.measured[0], record.measured[-1]
        value, behind = accuracy(last, "±"), f"at step {last['step']}"
        if first is not last:
            value = f"{first['eval/accuracy']:.3f} → {last['eval/accuracy']:.3f}"
            behind = f"{accuracy(first, '±')} to {accuracy(last, '±')}"
        over = "" if accuracy_margin(last) is None else " (95 % interval over prompts)"
        facts.append(("Held-out accuracy", value, behind + over))
    before = record.rows[0].get("eval/accuracy_before_warm_start")
    if before is not None:
        facts.append(("Before warm start", f"{before:.3f}", "held-out accuracy of the model as it was loaded"))
    tail = record.steps[-LAST_STEPS:]
    rewards = [row["reward"] for row in tail if row["reward"] is not None]
    if rewards:
        facts.append(("Reward", f"{statistics.fmean(rewards):.3f}", f"mean of {of_last(len(rewards), 'step')}"))
    if tail:
        if critical := critical_batch(tail):
            behind = f"where noise equals signal; a step had {record.prompts}"
            facts.append(("Critical batch", f"{critical:.0f} prompts", behind))
        rates = [row.get("learning_rate") for row in tail if row.get("grad_norm") != 0 and "learning_rate" in row]
        if rates and rates[-1] is not None:
            schedule = f"of the last update, schedule {record.of_algorithm('schedule')}"
            facts.append(("Learning rate", short(rates[-1]), schedule))
        per_step = statistics.fmean(row.get("step_time") or 0.0 for row in tail)
        tokens = f"{short(tail[-1].get('num_tokens') or 0)} tokens trained on"
        facts.append(("Time", f"{per_step:.2f} s per step", tokens))
    return facts


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
