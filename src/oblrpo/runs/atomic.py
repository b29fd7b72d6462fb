"""Writes that a reader or a crash sees whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader or a crash sees the old or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sync_folder(folder: Path) -> None:
    """Put the folder's files on the disk before it is renamed into place."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Put one file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
