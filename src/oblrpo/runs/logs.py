"""Logs that others have written: TRL's state, what trainers print or trackers keep, and tables; under our names."""

import codecs
import gzip
import io
import json
import re
import sqlite3
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from oblrpo.errors import InputError, pip_install
from oblrpo.regular_files import regular
from oblrpo.runs.log_formats import LONGEST_LINE, SINGLE, UNREAD, Text, as_json
from oblrpo.runs.log_rows import NAMES, Rows, named

TRL_STATE, CUT = "trainer_state.json", "which is no whole JSON"
HISTORY = re.compile(r"""['"]log_history['"]\s*:\s*\[?""")
MOST_BYTES = 1 << 30
"""Of what comes from a pipe: three million rows of JSON, so that an endless one fills no memory."""


class Log(NamedTuple):
    """What a log holds."""

    rows: Rows  # a row a step, under our names: numbers, and None for what is not finite
    steps: int  # how many steps the run was to make; 0: unknown
    source: str


def read_log(path: Path) -> Log | None:
    """Read another trainer's log: a folder of TRL's or a tracker's (None without one), or a file, of whatever form.

    A file may be packed by gzip, or a pipe; "-" is standard input.
    """
    try:
        if path.is_dir():
            return newest_state(path) or (_log(f"{path}", *found) if (found := tracked(path)) else None)
        with _opened(path) as file:
            return _read(path, file)
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{path!s:.999} cannot be read ({reason}); give the folder of a run, or its log.") from None


def _opened(path: Path) -> IO[bytes]:
    """A file, unpacked; what comes from a pipe is kept in memory, since readers go back to its start."""
    path = Path("/dev/stdin") if str(path) == "-" else path
    piped = stat.S_ISFIFO(path.stat().st_mode)
    with (path if piped else regular(path)).open("rb") as file:
        head = file.read(MOST_BYTES if piped else 2)
    if len(head) == MOST_BYTES:
        raise InputError(f"{path} has {MOST_BYTES >> 30} GiB or more; give a file, or a part of it.")
    packed = head.startswith(b"\x1f\x8b")
    unpacked: Any = gzip.open if packed else lambda file: file
    return unpacked(io.BytesIO(head)) if piped else unpacked(path) if packed else path.open("rb")


def _read(path: Path, file: IO[bytes]) -> Log:
    name, head = str(path), file.read(4096)
    if isinstance(file, io.BufferedReader) and (found := tracked(path, head[:64])):
        return _log(name, *found)
    file.seek(0)
    wide = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell writes
    if b"\0" in head.strip(b"\0") and not wide:  # a log that was cut while it was written begins with zeros
        raise InputError(
            f"{name} is a binary file, not text; give what a trainer prints or writes, or the unpacked "
            "files of W&B, TensorBoard or trackio."
        )
    with io.TextIOWrapper(file, "utf-16" if wide else "utf-8-sig", "replace") as text:
        return _of_text(name, text)


def _log(name: str, rows: Rows, kind: str, said: list[str], steps: int = 0) -> Log:
    said = said + [f"rows of repeated steps, of which the last count: {rows.again}"] * (rows.again > 0)
    source = kind + (f" ({'; '.join(said)})" if said else "")
    return Log(known(rows, name, source), steps, source)


def _of_text(name: str, file: IO[str]) -> Log:
    head = file.read(1 << 16)
    first, _, more = head.lstrip().partition("\n")
    file.seek(0)
    history, lines = HISTORY.search(head), more.strip() and isinstance(as_json(first), dict)
    if history or (re.match(r'\[\s*[{\]]|[\[{]$|{\s*"', first) and not lines):
        value = as_json(whole := file.read())
        state = value if isinstance(value, dict) and isinstance(value.get("log_history"), list) else None
        if (entries := entries_of(value, name)) or (state and not state["log_history"]):
            kind = f"TRL, {Path(name).name}" if state else "a JSON list" if isinstance(value, list) else "JSON"
            most = state.get("max_steps") if state else 0
            most = most if type(most) is int else 0
            return _log(name, Rows(entries), kind, [], most) if entries else Log(Rows(), most, kind)
        file = io.StringIO(whole[history.end() :] if history else whole)
    text, rows = Text(iter(lambda: file.readline(LONGEST_LINE), ""), name), (Rows(), Rows(), Rows())
    for sure, entry in text.entries():
        text.notes[UNREAD] += not rows[sure].add(entry)
    counts = [len(each.close(printed=sure == 1)) for sure, each in enumerate(rows)]
    # pairs in a text may be anything: a dict of three metrics is surer, however few there are, but steps are surest
    steps = rows[1].counted and not rows[0].counted and rows[0].most > rows[1].most
    best = 2 if counts[2] else int(rows[1].most > 2 or 10 * counts[1] >= counts[0]) and not steps
    text.notes[UNREAD] += sum(counts) - counts[best]
    if best < 2 and counts[best] == 1 and rows[best].counted and not {"loss", "grad_norm"} & rows[best][0].keys():
        raise InputError(
            f"{name} is not a log: it holds numbers for {', '.join(rows[best].names[:8])} once, with no step, loss or "
            "grad_norm; give a log of several steps."
        )
    # a mean over a batch is not always one of the same two numbers; what 20 rows of one completion each earn may be
    alone = best == 0 and rows[0].counted and rows[0].most == 1 and counts[0] >= 20 and "reward" in rows[0][0]
    if alone and len({row.get("reward") for row in rows[0]}) == 2:
        text.notes[SINGLE], counts = text.notes[SINGLE] + counts[0], [0]
    if text.notes[SINGLE] and not sum(counts):
        raise InputError(
            f"{name} has {text.notes[SINGLE]} lines about single completions, and no metrics of steps; give the log in "
            "which the trainer prints its steps."
        )
    kinds = " and ".join(kind for kind, sure in text.kinds.items() if sure == best)
    kinds = f"TRL, {Path(name).name}, {CUT}" if history else kinds or "text"
    return _log(name, rows[best], kinds, [f"{note}: {count}" for note, count in text.notes.items() if count])


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
            raise InputError(f"{name} has columns of different lengths ({lengths!s:.200}); a row needs all of them.")
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
            f"{name} holds no known metric. Found: {found}: {names}. Looked for: {', '.join(NAMES)}, or what "
            "TRL, verl, OpenRLHF, ms-swift, unsloth, slime and others call them, in JSON, tables and printed lines."
        )
    return rows


def state_files(run: Path) -> list[Path]:
    """The `trainer_state.json` of a folder of TRL's and of its folders checkpoint-N, the newest first."""
    numbered = [(file.parent.name.removeprefix("checkpoint-"), file) for file in run.glob(f"checkpoint-*/{TRL_STATE}")]
    newest = sorted(((int(number), file) for number, file in numbered if number.isdecimal()), reverse=True)
    return [file for file in (run / TRL_STATE, *(file for _, file in newest)) if file.is_file()]


def newest_state(run: Path) -> Log | None:
    """Read the state of a folder of TRL's that goes farthest; None if there is none."""
    found: list[Log] = []
    damaged: list[str] = []
    for file in state_files(run):
        try:
            log = read_log(file) or Log(Rows(), 0, "")
        except InputError:
            damaged.append(f"{file} cannot be read as a log of TRL's")
            continue
        found.append(log._replace(source=log.source.replace(TRL_STATE, str(file.relative_to(run)))))
        if log.rows and file.parent != run and CUT not in log.source:
            break
    if damaged and not found:
        raise InputError(f"{damaged[0]}; give the folder of another checkpoint.")
    newest = max(found, key=lambda log: log.rows[-1]["step"] if log.rows else -1, default=None)
    return newest and newest._replace(source="; ".join([newest.source, *damaged]))


Entries = Iterator[Mapping[str, Any]]
BLOCK = 1 << 15
"""Bytes of a block of LevelDB's log format, in which W&B writes: parts of (checksum, size, kind), none over its end."""


def _wandb(path: Path, said: list[str]) -> Entries:
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = path.read_bytes(), 7, b""
    while place < len(content):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        checksum, size, kind = struct.unpack("<IHB", content[place : place + 7].ljust(7, b"\0"))
        part, place = content[place + 7 : place + 7 + size], place + 7 + size
        if place > len(content) or zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"damaged or cut off before byte {place}")
        record = part if kind in (1, 2) else record + part  # whole or first, middle, last
        if kind in (1, 4):
            items = Record.FromString(record).history.item
            entry = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            yield dict(sorted(entry.items()))  # W&B writes them in any order


def _tensorboard(path: Path, said: list[str]) -> Entries:
    from tensorboard.compat.proto.event_pb2 import Event

    content, place, entry = path.read_bytes(), 0, dict[str, Any]()
    while place < len(content):  # size (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(content[place : place + 8], "little")
        event, place = content[place + 12 : place + 12 + size], place + 16 + size
        if place > len(content):
            raise ValueError(f"damaged or cut off before byte {place}")
        for value in (found := Event.FromString(event)).summary.value:
            if value.HasField("simple_value"):
                if entry.get("step") != found.step:
                    yield entry
                    entry = {"step": found.step}
                entry[value.tag] = value.simple_value
    yield entry


def _trackio(path: Path, said: list[str]) -> Entries:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
        runs = [*base.execute("SELECT run_name FROM metrics GROUP BY run_name ORDER BY max(id)")]
        said += [f"{runs[-1][0]!s:.99}, the newest of {len(runs)} runs"] if len(runs) > 1 else []
        for step, metrics in base.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", runs[-1]):
            yield {"_step": step, **json.loads(metrics)}  # trackio's own count, as W&B's


TRACKERS = {
    "W&B": ("wandb", "*.wandb", b":W&B", _wandb),
    "TensorBoard": ("tensorboard", "*tfevents*", b"brain.Event:", _tensorboard),
    "trackio": ("", "*.db", b"SQLite format 3\0", _trackio),
}
"""The library that reads a tracker's files, if it needs one, their names, what they begin with, and their reader."""


def tracked(path: Path, head: bytes = b"") -> tuple[Rows, str, list[str]] | None:
    """Read what a tracker has kept in a file with this head, or of the newest run in a folder or up to two below it.

    Returns the rows, what was read, and what is to be said of it; None where there is nothing of a tracker's.
    """
    for tracker, (library, names, mark, read) in TRACKERS.items():
        found = {file.resolve() for below in ("", "*/", "*/*/") for file in path.glob(below + names)}
        files = sorted(found, key=_begun) if path.is_dir() else [path] * (mark in head)
        if not files:
            continue
        if library and not find_spec(library):
            raise InputError(f"{path} is a log of {tracker}'s; to read it, install its library: {pip_install(library)}")
        run, rows, said = files[-1].parent, Rows(), list[str]()
        for file in [file for file in files if file.parent == run and tracker == "TensorBoard"] or files[-1:]:
            try:  # TensorBoard has a file for each time that the run was resumed
                for entry in read(file, said):
                    rows.add(entry)
            except Exception as error:  # whatever a library raises over what is damaged, SQLite over others' tables
                said.append(f"{file.name}: {type(error).__name__}, {' '.join(str(error).split()):.200}")
        return rows.close(), f"what {tracker} keeps" + f" in {run.name}" * path.is_dir(), said
    return None


def _begun(file: Path) -> tuple[list[str], float]:
    """When a file was begun, by its name or its folder's, which copies keep; or changed."""
    return re.findall(r"\d{8}_\d{6}|(?<=tfevents\.)\d{10}", str(file))[-1:], file.stat().st_mtime
