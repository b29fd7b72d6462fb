"""What trackers keep on the disk: files of W&B and TensorBoard, and trackio's database."""

import json
import re
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, pip_install
from oblrpo.runs.log_rows import Rows

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
    return re.findall(r"\d{8}_\d{6}|\d{10}", str(file))[-1:], file.stat().st_mtime
