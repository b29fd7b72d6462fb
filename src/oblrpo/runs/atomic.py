"""Writes that a reader or a crash sees whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from oblrpo.errors import InputError


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader or a crash sees the old or the new, never a part.

    Raises:
        InputError: something that is no regular file is there (a device, a pipe, a folder), which must not be replaced.
    """
    if os.path.lexists(path) and not path.is_file():
        raise InputError(f"{path} is there and is no regular file; give another.")
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def check_writable(path: Path) -> None:
    """Find out before the work whether `write_atomically` will be able to write there; leaves nothing behind.

    Raises:
        InputError: the file cannot be written there.
    """
    try:
        if os.path.lexists(path) and not path.is_file():
            raise InputError(f"{path} is there and is no regular file; give another.")
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
        partial.unlink()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL, or none
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"cannot write to {str(path)[:200]!r} ({reason}); give a file in a folder that is there."
        ) from None


def sync_folder(folder: Path) -> None:
    """Put the folder's files, and those below it, on the disk before it is renamed into place."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Put one file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
