"""Checksums of what a run has written or reads, so that damage and changes are noticed before they are trained on."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from oblrpo.errors import InputError
from oblrpo.regular_files import regular

SUMS = "SHA256SUMS"  # the file of a folder's checksums, in the format of `sha256sum`
READ = (".json", ".jinja", ".safetensors", ".model", ".txt", ".py", ".bin")
"""What the names of files end with that loading a model or a state may read."""


def write_sums(folder: Path) -> None:
    """Write the checksums of all files of a folder, and of those below it, into it."""
    lines = (f"{sum_of(folder / name)}  {name}\n" for name in sorted(_names(folder)))
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """Return the checksums that were written into a folder, by the path of the file; InputError if it is damaged."""
    try:
        lines = regular(folder / SUMS).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{SUMS} is missing or cannot be read") from None
    pairs = [line.partition("  ") for line in lines]
    if not all(name and _is_inside(name) for *_, name in pairs):
        raise InputError(f"{SUMS} is damaged")
    return {name: digest for digest, _, name in pairs}


def damage(folder: Path, needed: Sequence[str] = (), spared: str = "") -> str:
    """Return what is wrong with a folder whose checksums were written, in words; empty if every file is unchanged.

    All files have to be listed that loading may read, and one of each of the patterns `needed`; others are left alone.
    The one that is `spared` has to be listed, and need not be there.
    """
    try:
        listed = read_sums(folder)
    except InputError as error:
        return str(error)
    strange = {name for name in _names(folder) - listed.keys() if name.endswith(READ)}
    if unlisted := min((name for name in strange if "/" not in name or name.endswith(".jinja")), default=""):
        return f"{unlisted} is not in {SUMS}"
    for name, digest in listed.items():
        if name == spared:
            continue
        if not os.path.isfile(folder / name):  # a name may be too long for pathlib
            return f"{name} is missing"
        try:
            same = sum_of(folder / name) == digest
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not same:
            return f"{name} is not what was written"
    absent = [pattern for pattern in needed if not any(fnmatchcase(name, pattern) for name in listed)]
    return f"{absent[0]} is missing" if absent else ""


def _names(folder: Path) -> set[str]:
    """Return the files in and below a folder, by their paths in it, but for hidden ones and the checksums."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts)} - {SUMS}


def _is_inside(name: str) -> bool:
    """Return whether a name in the list cannot lead out of the folder."""
    path = PurePosixPath(name)
    return str(path) == name and bool(path.parts) and not {"..", "/"} & {*path.parts} and not Path(name).is_absolute()


MARK = "# SHA-256 of the settings below: "


def with_checksum(text: str) -> str:
    """Return the text below a line with its checksum, which YAML takes for a comment."""
    return f"{MARK}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def has_valid_checksum(text: str) -> bool:
    """Return whether a text is what `marked` wrote; one without its checksum is not."""
    first, _, rest = text.partition("\n")
    return first == MARK + hashlib.sha256(rest.encode()).hexdigest()


def sum_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sum_of_texts(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts, a line each."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
