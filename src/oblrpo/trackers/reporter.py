"""The reporter sends every library what metrics.jsonl holds, once."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from types import TracebackType
from typing import Any

from oblrpo.errors import InputError, shown
from oblrpo.runs import Metrics, RunFolder, write_atomically
from oblrpo.trackers.libraries import TRACKERS, Opening, Tracker, Values
from oblrpo.workers import in_thread

NOTE = "trackers.json"
"""The file in the run's folder that holds, by library, the run's name and identity there and the last step sent."""

PATIENCE = 300.0
"""Seconds that a library may take to start, for a step, or to write at the end what is left."""
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
            values["completions"] = [{"step": step} | each for each in rows]  # under TRL's name
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
            raise InputError(f"{path} is damaged; remove it, and libraries get the run from its start.") from None

    def _write_note(self) -> None:
        write_atomically(self._folder.path / NOTE, json.dumps(self._note, indent=1) + "\n")


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
