"""The reporter sends every library what metrics.jsonl holds, once.

A step's metrics go under their own keys; warnings come as text. No library needs the network: TensorBoard and trackio
write files, and W&B stays offline unless the environment says otherwise (WANDB_MODE=online; TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from oblrpo.errors import InputError, did_you_mean, pip_install, shown
from oblrpo.runs import Metrics, RunFolder, write_atomically
from oblrpo.settings import yaml_text
from oblrpo.workers import in_thread

Rows = list[dict[str, Any]]
Values = dict[str, float | str | Rows]
"""A step's metrics; warnings are text, and completions, if they are sent, the rows of a table."""


@dataclass(frozen=True)
class Opening:
    """What a library is given when it is opened."""

    folder: Path  # the run's folder
    name: str  # the run's name, which stays the same when it is resumed
    identity: str  # the run's identity in the library, which stays the same, too
    project: str
    settings: dict[str, Any]
    sent: int  # the last step that the library was sent before; -1 where it was sent none


@dataclass
class Tracker:
    """An open run in a library."""

    lacks: int  # the first step that the library is still to be sent
    log: Callable[[int, Values], None]  # takes one step's values
    close: Callable[[bool], None]  # writes what is left; its argument says whether the run failed


def tensorboard(opening: Opening) -> Tracker:
    """Event files in RUN/tensorboard, through torch's writer; a step is on the disk when `log` returns.

    What an interrupted run wrote after the last step noted is struck out (`purge_step`), and written again.
    """
    from torch.utils.tensorboard import SummaryWriter

    lacks = opening.sent + 1
    writer: Any = SummaryWriter(str(opening.folder / "tensorboard"), **({"purge_step": lacks} if lacks else {}))
    if not lacks:
        lines = yaml_text(opening.settings).splitlines()
        writer.add_text("config", "\n".join(f"    {line}" for line in lines))  # indented: code, in Markdown

    def log(step: int, values: Values) -> None:
        for key, value in values.items():
            if not isinstance(value, list):  # it has no tables
                (writer.add_text if isinstance(value, str) else writer.add_scalar)(key, value, step)
        writer.flush()

    return Tracker(lacks, log, lambda failed: writer.close())


def wandb(opening: Opening) -> Tracker:
    """A run of Weights & Biases, its files in RUN/wandb, beside one that the program has open, which stays as it is.

    Online the server reports what it has. Offline every start of the run makes a folder with the complete run, so that
    only the newest need be synced.
    """
    import wandb as library

    def table(rows: Rows) -> Any:
        return library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb checks it
    run: Any = library.init(
        dir=str(opening.folder), project=opening.project, name=opening.name, id=opening.identity,
        resume="allow" if mode == "online" else None, mode=mode, config=opening.settings,
        settings=library.Settings(console="off", silent=True, reinit="create_new"),
    )  # fmt: skip
    return Tracker(
        run.starting_step if run.resumed else 0,
        lambda step, values: run.log(_with_tables(values, table), step=step, commit=True),
        lambda failed: run.finish(exit_code=int(failed)),
    )


def trackio(opening: Opening) -> Tracker:
    """A run of trackio, in its own database on this machine; it writes a moment later, so a kill can cost a step."""
    import pandas
    import trackio as library

    lacks = opening.sent + 1
    run: Any = library.init(
        project=opening.project, name=opening.name, config=opening.settings, resume="allow" if lacks else "never",
        embed=False, auto_log_cpu=False, auto_log_gpu=False,
    )  # fmt: skip
    return Tracker(
        lacks,
        lambda step, values: run.log(
            _with_tables(values, lambda rows: library.Table(dataframe=pandas.DataFrame(rows))), step=step
        ),
        lambda failed: run.finish(),
    )


def _with_tables(values: Values, table: Callable[[Rows], Any]) -> dict[str, Any]:
    return {key: table(value) if isinstance(value, list) else value for key, value in values.items()}


TRACKERS: dict[str, Callable[[Opening], Tracker]] = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
"""How each is opened, by the names that TRL uses, which are those of the packages and of our extras, too."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse unknown names, names given twice, and libraries that are not installed."""
    for place, name in enumerate(names):
        if name not in TRACKERS:
            raise InputError(f"unknown report_to {name!r}; known: {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}")
        if name in names[:place]:
            raise InputError(f"report_to names {name} twice; once is enough.")
        if find_spec(name) is None:
            raise InputError(f"report_to {name} needs its library; install it with: {pip_install(name)}")


NOTE = "trackers.json"
"""The file in the run's folder that holds, by library, the run's name and identity there and the last step sent."""

PATIENCE = 300.0  # seconds that a library may take to start, for a step, or to write at the end what is left
HANGS = f"no answer in {PATIENCE:g} s"


class Reporter:
    """The reporter feeds the libraries of `report_to`, and calls `warn` with one that fails.

    A resumed run does some steps again, with the same result: those that a library has are not sent a second time. One
    that comes later, or lacks some, is sent the earlier steps first. One that fails, hangs or ends its thread is given
    up with a warning, for the training matters more; the steps it missed are sent when the run is resumed.
    """

    def __init__(
        self, names: Sequence[str], folder: RunFolder, settings: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._names, self._folder, self._settings, self._warn = names, folder, settings, warn
        self._note: dict[str, dict[str, Any]] = {}
        self._open: dict[str, Tracker] = {}

    def __enter__(self) -> Reporter:
        if not self._names:
            return self
        self._note = self._read_note()
        rows = self._folder.read_metrics()
        try:
            for name in self._names:
                self._start(name)
                for row in rows:
                    self._send(name, row)
        except BaseException:
            self._close(list(self._open), failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(list(self._open), failed=kind is not None and not issubclass(kind, KeyboardInterrupt))

    def log(self, row: Metrics) -> None:
        """Send a step's metrics to every tracker that has not received them."""
        for name in list(self._open):
            self._send(name, row)

    def _start(self, name: str) -> None:
        fresh = {"name": str(self._folder.path), "id": secrets.token_hex(4), "step": -1}
        entry = self._note.setdefault(name, fresh)
        project = str(self._settings["project"])
        opening = Opening(self._folder.path, entry["name"], entry["id"], project, self._settings, entry["step"])
        opened, fault = _answer(TRACKERS[name], opening)
        if fault:
            raise InputError(f"{name} cannot be started ({fault}); fix that, or leave it out of report_to.")
        self._open[name] = opened
        self._write_note()

    def _send(self, name: str, row: Metrics) -> None:
        step = row["step"]
        if name not in self._open or step < self._open[name].lacks:
            return
        values = values_of(row)
        if self._settings.get("log_completions") and (rows := self._folder.read_completions(step)):
            values["completions"] = [{"step": step} | in_cells(each) for each in rows]  # under TRL's name
        if fault := _answer(self._open[name].log, step, values)[1]:
            self._warn(f"{name} failed at step {step} and is disabled for this run ({fault}); --resume tries again.")
            if fault == HANGS:
                del self._open[name]
            else:
                self._close([name], failed=True)
            return
        self._open[name].lacks = step + 1
        self._note[name]["step"] = step
        self._write_note()

    def _close(self, names: Sequence[str], failed: bool) -> None:
        for name in names:
            if fault := _answer(self._open.pop(name).close, failed)[1]:
                self._warn(f"{name} did not close, its last steps may be missing ({fault}).")

    def _read_note(self) -> dict[str, dict[str, Any]]:
        path = self._folder.path / NOTE
        if not path.is_file():
            return {}
        try:
            note = json.loads(path.read_text("utf-8"))
            return {
                str(library): {"name": str(entry["name"]), "id": str(entry["id"]), "step": int(entry["step"])}
                for library, entry in note.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{path} is damaged; remove it, and the trackers get the run from its start.") from None

    def _write_note(self) -> None:
        write_atomically(self._folder.path / NOTE, json.dumps(self._note, indent=1) + "\n")


def in_cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for a table, whose columns have one type each: the messages of an episode as JSON text."""
    return {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value for key, value in row.items()
    }


def values_of(row: Metrics) -> Values:
    """Return a step's metrics as libraries take them: numbers, and warnings as one text, without what has no value."""
    values: Values = {key: value for key, value in row.items() if isinstance(value, (int, float)) and key != "step"}
    if row.get("warnings"):
        values["warnings"] = "\n\n".join(row["warnings"])
    return values


def _answer(call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Call a library; return its answer, and what went wrong, or "". One that hangs is left behind in its thread."""
    future = in_thread(call, *args)
    if future not in wait([future], PATIENCE).done:
        return None, HANGS
    if error := future.exception():
        return None, f"{type(error).__name__}: {' '.join(shown(str, error).split())[:200]}"
    return future.result(), ""
