"""The diagnosis of a run that somebody's trainer has left, whole or so far."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oblrpo import objects
from oblrpo.algorithms import ALGORITHMS, LOOKS_ACROSS
from oblrpo.diagnosis.course import WINDOW, Facts
from oblrpo.diagnosis.of_rewards import same_reward
from oblrpo.diagnosis.table import CONDITIONS
from oblrpo.diagnosis.watch import Finding, Watch
from oblrpo.errors import InputError
from oblrpo.runs import RunFolder
from oblrpo.runs.logs import known, read_log, rows_of
from oblrpo.settings import settings_in

MEASURED = ("auto", "kl")  # the schedules whose rate follows how far updates move the policy


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, worst first; `print` shows it in words."""

    source: str
    """What was read."""
    steps: int
    """The number of steps in it."""
    findings: list[Finding]
    """What is wrong."""
    notes: list[Finding]
    """What is worth knowing at the end of it, and not wrong."""
    unchecked: dict[str, tuple[str, ...]]
    """The conditions that could not be looked for, and the metrics that the log lacks for that."""

    @classmethod
    def of(cls, watch: Watch, source: str) -> Diagnosis:
        """What a watch has found."""
        found = watch.findings
        counts = {key: column.count for key, column in watch.course.columns.items() if key != "step"}
        steps = watch.course.rewarded or max(counts.values(), default=0)
        lasting = [f for f in found if not f.wrong and f.until >= watch.course.step - WINDOW]
        return cls(source, steps, [f for f in found if f.wrong], lasting, watch.unchecked)

    def __str__(self) -> str:
        looked = len(CONDITIONS) - len(self.unchecked)
        lines = [f"{self.source}: {self.steps} steps; {looked} of {len(CONDITIONS)} conditions could be looked for", ""]
        if not self.findings:
            so_far = "" if self.steps >= FEWEST else f" so far, in fewer than {FEWEST} steps"
            unseen = ", as far as can be told without a reward" if same_reward.name in self.unchecked else ""
            lines += [f"Nothing is wrong{so_far}{unseen}."]
        for number, finding in enumerate(self.findings, start=1):
            lines += [f"{number}. {finding.name}, {finding.when}: {finding.sure}", f"   {finding.sentence}"]
            lines += [f"   What to do: {finding.cure}"]
            lines += ["   What follows from it, and needs no cure of its own:"] if finding.follows else []
            lines += [*(f"   -  {each.name}, {each.when}. {each.sentence}" for each in finding.follows), ""]
        if self.notes:
            lines += ["", "Worth knowing, and not wrong:"]
            lines += [f"-  {note.name}, {note.when}. {note.sentence} {note.cure}" for note in self.notes]
        if self.unchecked:
            lines += ["", "Not looked for, for want of a metric:"]
            lines += [f"-  {name} ({', '.join(keys)})" for name, keys in self.unchecked.items()]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """It as one JSON object."""
        return {
            "source": self.source,
            "steps": self.steps,
            "findings": [finding.plain() for finding in self.findings],
            "notes": [note.plain() for note in self.notes],
            "unchecked": {name: list(keys) for name, keys in self.unchecked.items()},
        }


FEWEST = 20  # steps below which most conditions cannot hold yet


def diagnose(run: Any) -> Diagnosis:
    """Say what is wrong with a run, since which step, how sure that is, and what to do.

    Args:
        run: what `oblrpo.train` returns; the folder of a run, ours or TRL's; a log of verl's, JSON Lines or CSV with
            TRL's names; or rows, one dict of metrics a step.

    Raises:
        InputError: there is no such run, or it cannot be read.

    Examples:
        >>> rows = [{"step": n, "reward": 0.5 * (n < 30) + n % 2 / 50} for n in range(60)]
        >>> print(diagnose(rows).findings[0].sentence)
        The reward has fallen: its mean over 10 steps is 0.310, and was 0.510 around step 19.
    """
    run = getattr(run, "output", run)
    if not isinstance(run, (str, os.PathLike)):
        rows = known(rows_of(row for _, row in objects.rows_of(run, "run")), "run")
        return Diagnosis.of(Watch(facts_of_log(rows)).over(rows), "rows")
    path = Path(run)
    if os.path.isfile(path / "config.yaml"):  # a name may be too long for pathlib
        folder = RunFolder(path)
        rows, settings = folder.read_metrics(), settings_in(folder.config_file)
        return Diagnosis.of(Watch(facts_of(settings)).over(rows), f"{path}, of oblrpo train")
    log = read_log(path)
    if log is None or not log.rows:
        raise InputError(
            f"{path} holds no config.yaml and metrics.jsonl, nor a trainer_state.json of TRL with a step in it; give "
            "the folder of a run, or a file: what verl prints or writes, JSON Lines or CSV."
        )
    return Diagnosis.of(Watch(facts_of_log(log.rows)).over(log.rows), f"{path}, {log.source}")


def facts_of(settings: Mapping[str, Any]) -> Facts:
    """What the settings of a run of ours say, by flag."""
    algorithm, prompts = ALGORITHMS.get(str(settings.get("algorithm"))), settings.get("prompts_per_step")

    def part(name: str) -> str:
        return str(settings.get(name) or (getattr(algorithm, name) if algorithm else ""))

    return Facts(
        looks_across=part("baseline") in LOOKS_ACROSS,
        measured_rate=part("schedule") in MEASURED,
        corrects_sampler=settings.get("sampler_correction") != "measured",
        prompts=prompts if isinstance(prompts, int) else 0,
    )


def facts_of_log(rows: Iterable[Mapping[str, Any]]) -> Facts:
    """What the log of another trainer says of it: ours inside TRL and verl tells how far an update went."""
    ours = any(key.endswith("step_kl") for row in rows for key in row)
    return Facts(looks_across=ours, measured_rate=ours)
