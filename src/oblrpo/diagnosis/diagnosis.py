"""The diagnosis of a run or of another trainer's log, complete or so far."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from oblrpo import objects
from oblrpo.diagnosis.course import Facts
from oblrpo.diagnosis.next_steps import Left, NextStep, next_steps
from oblrpo.diagnosis.table import CONDITIONS
from oblrpo.diagnosis.watch import Finding, Watch
from oblrpo.errors import InputError
from oblrpo.runs import RunFolder, from_here
from oblrpo.runs.log_rows import Rows
from oblrpo.runs.logs import entries_of, known, read_log
from oblrpo.settings import settings_in
from oblrpo.tables.algorithms import ALGORITHMS, MEASURED
from oblrpo.tables.baselines import LEARNS_FROM_TIES


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What is wrong with a run, worst first; `print` shows it in words."""

    source: str  # what was read
    steps: int  # the number of steps in it
    findings: list[Finding]  # what is wrong
    notes: list[Finding]  # conditions at the end of it that are no problem
    unchecked: dict[str, tuple[str, ...]]
    """The conditions that could not be checked, and the metrics that the log lacks for that."""
    empty: dict[str, int]  # those of these that it has without a finite value, and in how many rows
    ours: bool = False  # it is a run of `oblrpo train`, which logs all that it can
    unit: str = "step"  # what `steps` counts: "row" where a log names no steps
    enough: int = 20  # the number of steps below which most conditions cannot hold yet: two windows
    next_steps: list[NextStep] = field(default_factory=list)  # what to do next, at most three

    @classmethod
    def of(cls, watch: Watch, source: str, left: Left, ours: bool = False) -> Diagnosis:
        """What a watch has found in what a run has left behind."""
        found = watch.findings
        notes = [f for f in found if f.over or (not f.wrong and f.until >= watch.course.compared - watch.course.span)]
        wrong = [f for f in found if f.wrong]
        course, unchecked = watch.course, watch.unchecked
        lacking = dict.fromkeys(key for keys in unchecked.values() for key in keys)
        empty = {key: course.empty[key] for key in lacking if key in course.empty}
        unit, enough, do_next = watch.facts.unit, 2 * course.span, next_steps(watch, left)
        return cls(source, course.steps, wrong, notes, unchecked, empty, ours, unit, enough, do_next)

    @property
    def looked(self) -> str:
        """How many conditions could be checked, in words."""
        return f"{len(CONDITIONS) - len(self.unchecked)} of {len(CONDITIONS)} conditions could be checked"

    @property
    def verdict(self) -> str:
        """The sentence where nothing was found."""
        so_far = "" if self.steps >= self.enough else f" so far, in fewer than {self.enough} {self.unit}s"
        unseen = ", as far as a log without a reward shows" if "same reward" in self.unchecked else ""
        return f"No problem found{so_far}{unseen}."

    def __str__(self) -> str:
        counted = f"{self.steps} {self.unit}{'s' * (self.steps != 1)}"
        lines = [f"{self.source}: {counted}; {self.looked}"]
        lines += [] if self.findings else ["", self.verdict]
        for number, finding in enumerate(self.findings, start=1):
            lines += ["", f"{number}. {finding.name}, {finding.when}: {finding.sure}", f"   {finding.sentence}"]
            lines += [f"   What to do: {finding.cure}"]
            lines += [f"   {COMES_WITH}:"] if finding.follows else []
            lines += [f"   -  {each.name}, {each.when}. {each.sentence}" for each in finding.follows]
        never = [(key, rows) for key, rows in self.empty.items() if rows > 1]  # one row alone is a finding
        lines += ["", f"{NOTES}:"] if self.notes or never else []
        lines += [f"-  {note.name}, {note.when}. {note.sentence} {note.cure}".rstrip() for note in self.notes]
        lines += [f"-  {key} is NaN or infinite in all {rows} rows." for key, rows in never]
        lines += ["", f"{WHAT_NEXT}:"] if self.next_steps else []
        lines += [f"-  {each}" for each in self.next_steps]
        lacking = dict.fromkeys(key for keys in self.unchecked.values() for key in keys if key not in self.empty)
        if lacking and not self.ours:
            words = f"Not checked: {len(self.unchecked)} conditions (--json lists them). The log lacks "
            lines += ["", textwrap.fill(f"{words}{', '.join(lacking)}.", 100, break_long_words=False)]
        return "\n".join(lines)

    __repr__ = __str__  # for a notebook, whose last line is not printed

    def plain(self) -> dict[str, Any]:
        """It as one JSON object."""
        return {
            "source": self.source,
            "steps": self.steps,
            "findings": [finding.plain() for finding in self.findings],
            "notes": [note.plain() for note in self.notes],
            "next_steps": [each.plain() for each in self.next_steps],
            "unchecked": {name: list(keys) for name, keys in self.unchecked.items()},
            "never_finite": self.empty,
        }


COMES_WITH, NOTES = "What follows from this, and needs no separate fix", "Notes, not problems"
WHAT_NEXT = "What next"


def diagnose(run: Any) -> Diagnosis:
    """Say what is wrong with a run, since which step, how sure that is, and what to do.

    Args:
        run: what `oblrpo.train` returns; the folder of a run, ours or TRL's; a file, of what a trainer prints or of
            JSON or a table; or rows: dicts of metrics, a dict of lists, a data frame, or a trainer of TRL's.

    Raises:
        InputError: there is no such run, or it cannot be read.

    Examples:
        >>> rows = [{"step": n, "reward": 0.5 * (n < 30) + n % 2 / 50} for n in range(60)]
        >>> print(diagnose(rows).findings[0].sentence)
        The reward has fallen: its mean over 10 steps is 0.010, down from 0.510 around step 29.
    """
    path = _given(run)
    if isinstance(path, Rows):
        return Diagnosis.of(Watch(facts_of_log(path)).over(path), "rows", Left(list(path)))
    if os.path.isfile(path / "config.yaml"):  # a name may be too long for pathlib
        folder = RunFolder(path)
        rows, settings = folder.read_metrics(), settings_in(folder.config_file)
        watch, left = Watch(facts_of(settings)).over(rows), Left(rows, settings, folder)
        return Diagnosis.of(watch, f"{path}, a run of oblrpo train", left, ours=True)
    log = read_log(path)
    if log is None or not log.rows:
        raise InputError(
            f"{path} holds no config.yaml and metrics.jsonl, nor a trainer_state.json of TRL with a step in it; give "
            "the folder of a run, or a log file: what a trainer prints or writes, JSON, or a table of metrics."
        )
    return Diagnosis.of(Watch(facts_of_log(log.rows)).over(log.rows), f"{path}, {log.source}", Left(list(log.rows)))


def _given(run: Any) -> Rows | Path:
    """The rows that an object holds, or where a run is."""
    try:
        for path in (run, getattr(run, "output", None)):  # of what `oblrpo.train` returns
            if isinstance(path, (str, os.PathLike)):
                return Path(path) if path is run else from_here(Path(path))
        for holder in (run, getattr(run, "state", None)):  # of TRL: a trainer, or its state
            run = history if isinstance(history := getattr(holder, "log_history", None), list) else run
        if getattr(getattr(run, "index", None), "name", None):  # a frame of pandas, whose index holds the steps
            run = run.reset_index()
        if names := getattr(getattr(run, "dtype", None), "names", None):  # of numpy, with named columns
            run = [dict(zip(names, row, strict=True)) for row in run.tolist()]
        listed = getattr(run, "to_dicts", getattr(run, "to_pylist", None))  # of polars, of Arrow
        run = listed() if callable(listed) else run
        if not isinstance(run, Mapping):
            rows = Rows(row for _, row in objects.rows_of(run, "run"))
        elif (entries := entries_of(run, "run")) is not None:
            rows = Rows(entries)
        else:
            raise InputError("run is a dict without rows; give a list of dicts, one per step, or a dict of lists.")
    except InputError:
        raise
    except Exception as error:  # of an object of the user's own
        raise InputError(f"run cannot be read as rows ({type(error).__name__}: {error!s:.200}).") from error
    return known(rows, "run", "rows")


def facts_of(settings: Mapping[str, Any]) -> Facts:
    """What the settings of a run of ours say, by flag.

    Raises:
        InputError: one of them is no name, or no number of prompts.
    """
    names = {key: settings.get(key) for key in ("algorithm", "baseline", "schedule")}
    prompts = settings.get("prompts_per_step") or 0
    odd = [key for key, value in names.items() if not isinstance(value, str | None)]
    if odd or not isinstance(prompts, int) or prompts >= 2**31:
        raise InputError(f"config.yaml: {(odd or ['prompts_per_step'])[0]} has a value that oblrpo train never writes.")
    algorithm = ALGORITHMS.get(names["algorithm"] or "")

    def part(name: str) -> str:
        return str(names[name] or (getattr(algorithm, name) if algorithm else ""))

    return Facts(
        looks_across=part("baseline") in LEARNS_FROM_TIES,
        measured_rate=part("schedule") in MEASURED,
        corrects_sampler=settings.get("sampler_correction") != "measured",
        prompts=prompts,
    )


def facts_of_log(rows: Rows | Sequence[Mapping[str, Any]]) -> Facts:
    """What the log of another trainer says of it: ours inside TRL and verl shows how far an update went."""
    logged = rows if isinstance(rows, Rows) else Rows(rows)
    between = [int(after - before) for before, after in pairwise(logged.steps)]
    ours = "step_kl" in logged.names
    return Facts(
        looks_across=ours,
        measured_rate=ours,
        every=max(1, median_low(between)) if between else 1,
        unit="row" if logged.counted else "step",
        row_count=len(rows),
    )
