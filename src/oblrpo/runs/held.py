"""One writer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from oblrpo.errors import InputError


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes of ours from writing into a folder or a file meanwhile; a process that dies lets go.

    Raises:
        InputError: another process is writing there.
    """
    lock = FileLock(path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(f"another process is writing {path}; wait for its end, or give another --output.") from None
    try:
        yield
    finally:
        lock.release()
