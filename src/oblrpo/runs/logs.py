"""Logs that others have written: TRL's state, what trainers print, and any table of metrics, under our names."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from oblrpo.errors import InputError
from oblrpo.regular_files import regular
from oblrpo.runs.log_formats import LONGEST_LINE, Text, as_json
from oblrpo.runs.log_rows import NAMES, Rows, named

TRL_STATE = "trainer_state.json"


class Log(NamedTuple):
    """What a log holds."""

    rows: Rows
    """A row a step, under our names: numbers, and None for what is not finite."""
    steps: int
    """How many steps the run was to make; 0: unknown."""
    source: str


def read_log(path: Path) -> Log | None:
    """Read another trainer's log: a folder of TRL's (None without one), JSON, a table, or what a trainer prints."""
    try:
        if path.is_dir():
            return newest_state(path)
        with regular(path).open("rb") as file:
            head = file.read(4096)
        wide = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell writes
        if b"\0" in head.strip(b"\0") and not wide:  # a log that was cut while it was written begins with zeros
            raise InputError(
                f"{path} is a binary file, not text; give what a trainer prints or writes, or for TensorBoard and "
                "W&B the CSV that their pages export."
            )
        with path.open(encoding="utf-16" if wide else "utf-8-sig", errors="replace") as file:
            return _read(path, file)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path!s:.999} cannot be read ({reason}); give the folder of a run, or its log.") from None


def _read(path: Path, file: IO[str]) -> Log:
    if path.name == TRL_STATE:
        return read_state(path)
    head = file.read(1 << 16)
    first, _, more = head.lstrip().partition("\n")
    file.seek(0)
    if re.match(r"\[\s*[{\]]|[\[{]$", first) or (re.match(r'{\s*"', first) and not (more.strip() and as_json(first))):
        value = as_json(file.read())
        if (entries := entries_of(value, str(path))) is not None:
            kind = "a JSON list" if isinstance(value, list) else "JSON"
            return Log(known(Rows(entries), str(path), kind), 0, kind)
        if isinstance(value, dict) and "log_history" in value:
            return read_state(path)
        file.seek(0)
    text, rows = Text(iter(lambda: file.readline(LONGEST_LINE), ""), str(path)), (Rows(), Rows(), Rows())
    for sure, entry in text.entries():
        text.unread += not rows[sure].add(entry)
    counts = [len(each.close(printed=sure == 1)) for sure, each in enumerate(rows)]
    # pairs in a text may be anything: a dict of three metrics is surer, however few there are
    best = 2 if counts[2] else int(rows[1].most > 2 or 10 * counts[1] >= counts[0])
    text.unread += sum(counts) - counts[best]
    if best < 2 and counts[best] == 1 and rows[best].counted and not {"loss", "grad_norm"} & rows[best][0].keys():
        raise InputError(
            f"{path} is not a log: it holds numbers for {', '.join(rows[best].names[:8])} once, with no step, loss or "
            "grad_norm; give a log of several steps."
        )
    kinds = " and ".join(kind for kind, sure in text.kinds.items() if sure == best)
    notes = {"lines not read": text.unread, "rows of repeated steps, of which the last count": rows[best].again}
    said = "; ".join(f"{note}: {count}" for note, count in notes.items() if count)
    said = f" ({said})" if said else ""
    return Log(known(rows[best], str(path), f"{kinds or 'text'}{said}"), 0, kinds + said)


def entries_of(value: Any, name: str) -> list[Mapping[str, Any]] | None:
    """The rows of a list of dicts, a dict of lists or dicts, or what holds a `log_history`; None for anything else."""
    if isinstance(value, (list, tuple)):
        return [entry for entry in value if isinstance(entry, Mapping)] or None
    if not isinstance(value, Mapping) or not value:
        return None
    if "log_history" in value:
        return entries_of(value["log_history"], name)
    if inner := [each for each in value.values() if isinstance(each, list) and entries_of(each, name)]:
        return entries_of(max(inner, key=len), name)
    columns = {name: each for name, each in value.items() if isinstance(each, (list, tuple))}
    if columns and any(named(str(name))[0] for name in columns):
        lengths = {name: len(column) for name, column in columns.items()}
        if len({*lengths.values()}) > 1:
            raise InputError(f"{name} has columns that are not equally long ({lengths!s:.200}); a row needs all.")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if all(isinstance(each, Mapping) for each in value.values()):
        if any(named(str(name))[0] for name in value):  # by metric, then by row
            indices = dict.fromkeys(index for column in value.values() for index in column)
            return [{name: column.get(index) for name, column in value.items()} for index in indices]
        return [{"step": step, **row} for step, row in value.items()]
    return None


def known(rows: Rows, name: str, found: str) -> Rows:
    """Return rows that were read; `name` says where, and `found` as what."""
    if not any(key != "step" and (key == "skipped" or named(key)[0]) for row in rows for key in row):
        names = ", ".join(f"{each!s:.40}" for each in rows.names[:8]) or "no names of metrics"
        raise InputError(
            f"{name} holds no metric that is known. Found: {found}: {names}. Looked for: {', '.join(NAMES)}, or what "
            "TRL, verl, OpenRLHF, ms-swift, unsloth, slime and others call them, in JSON, tables and printed lines."
        )
    return rows


def state_files(run: Path) -> list[Path]:
    """The `trainer_state.json` of a folder of TRL's and of its folders checkpoint-N, the newest first."""
    numbered = [(file.parent.name.removeprefix("checkpoint-"), file) for file in run.glob(f"checkpoint-*/{TRL_STATE}")]
    newest = sorted(((int(number), file) for number, file in numbered if number.isdecimal()), reverse=True)
    return [file for file in (run / TRL_STATE, *(file for _, file in newest)) if file.is_file()]


def newest_state(run: Path) -> Log | None:
    """Read the state of a folder of TRL's that goes farthest of those that are complete; None if there is none."""
    found: list[Log] = []
    damaged: list[InputError] = []
    for file in state_files(run):
        try:
            found.append(read_state(file)._replace(source=f"TRL, {file.relative_to(run)}"))
        except InputError as error:
            damaged.append(error)
            continue
        if found[-1].rows and file.parent != run:
            break
    if damaged and not found:
        raise damaged[0]
    newest = max(found, key=lambda log: log.rows[-1]["step"] if log.rows else -1, default=None)
    unread = "".join(f"; {str(error).rpartition(';')[0]}" for error in damaged)
    return newest and newest._replace(source=newest.source + unread)


def read_state(file: Path) -> Log:
    """Read a `trainer_state.json`."""
    try:
        state = dict(json.loads(regular(file).read_bytes()))
        entries = [dict(entry) | {"step": _number_of_steps(entry["step"])} for entry in state["log_history"]]
        return Log(Rows(entries), _number_of_steps(state["max_steps"]), f"TRL, {file.name}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise InputError(
            f"{file} cannot be read as a log of TRL's ({reason}); give the folder of another checkpoint."
        ) from None


def _number_of_steps(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.50} is not a number of steps")
    return value
