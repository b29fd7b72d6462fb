"""Checksums of what a run has written, so that damage is noticed before it is trained on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from oblrpo.regular_files import regular

SUMS = "SHA256SUMS"
"""The file of a folder's checksums, in the format of `sha256sum`."""


def write_sums(folder: Path) -> None:
    """Write the checksums of all files of a folder into it."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = (f"{_sum(folder / name)}  {name}\n" for name in names)
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def damage(folder: Path) -> str:
    """What is wrong with a folder whose checksums were written, in words; empty if every file is what it was."""
    try:
        lines = regular(folder / SUMS).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{SUMS} is missing or cannot be read"
    for line in lines:
        known, _, name = line.partition("  ")
        if not name or Path(name).name != name:
            return f"{SUMS} is damaged"
        if not os.path.isfile(folder / name):  # a name may be too long for pathlib
            return f"{name} is missing"
        try:
            same = _sum(folder / name) == known
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not same:
            return f"{name} is not what was written"
    return "" if lines else f"{SUMS} is empty"


MARK = "# SHA-256 of the settings below: "


def marked(text: str) -> str:
    """The text under a line with its checksum, which YAML takes for a comment."""
    return f"{MARK}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def is_as_marked(text: str) -> bool:
    """Whether a text that `marked` wrote is still the same; one without a checksum is if it says anything."""
    if not text.startswith(MARK):
        return bool(text.strip())
    first, _, rest = text.partition("\n")
    return first.removeprefix(MARK) == hashlib.sha256(rest.encode()).hexdigest()


def _sum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
