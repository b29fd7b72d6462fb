"""Writing: files that a reader or a crash sees whole or not at all, one writer at a time, what a disk refuses."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from filelock import FileLock, Timeout

from oblrpo.errors import InputError

_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EIO,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
}  # fmt: skip

_OF_A_FILE_ONLY = {errno.EACCES, errno.EPERM, errno.EIO}
"""Without the name of a file these may be of a terminal, a socket or a device."""


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader or a crash sees the old or the new, never a part."""
    _refuse_irregular(path)
    partial = _beside(path)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # nothing is there once it has its name


def check_writable(path: Path) -> None:
    """Find out before the work whether `write_atomically` will be able to write there; leaves nothing behind."""
    check_name(path)
    try:
        _refuse_irregular(path)
        partial = _beside(path)
        partial.touch(exist_ok=False)
        partial.unlink()
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write to {str(path)[:200]!r} ({reason}); its folder must exist.") from None


def check_name(path: Path) -> None:
    """Refuse a path that no disk has: with NUL, or with a character that its encoding has not."""
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("it holds the character NUL")
    except ValueError as error:
        raise InputError(f"cannot write to {str(path)[:200]!r} ({error}); give another name.") from None


def _beside(path: Path) -> Path:
    """A name that nothing else writes to, neither another process of ours nor a user."""
    return path.with_name(f".{path.name}.{token_hex(4)}.partial")


def _refuse_irregular(path: Path) -> None:
    if os.path.lexists(path) and not path.is_file():
        raise InputError(f"{path} exists and is not a regular file; give another.")


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


@contextmanager
def locked(path: Path, keep: bool = True) -> Iterator[None]:
    """Keep other processes of ours from writing into a folder or a file meanwhile; a process that dies lets go.

    The lock's file lies in a folder that exists, else beside it. Without `keep` it is removed at the end: the folder is
    yet to come.
    """
    file = path / ".lock" if keep and path.is_dir() else path.with_name(f".{path.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(f"another process is writing {path}; wait until it ends, or give another --output.") from None
    try:
        yield
    finally:
        if not keep and os.name == "posix" and not file.stat().st_size:  # one with content is a user's own
            file.unlink()
        lock.release()


def disk_trouble(error: Exception) -> str:
    """What the disk refused, in a sentence, if that is what an error says, also one of a library written in Rust."""
    number, name = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    if number is None and (of_rust := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(of_rust[1])
    if number not in _REFUSALS or (number in _OF_A_FILE_ONLY and name is None):
        return ""
    where = f" {str(name)[:200]!r}" if isinstance(name, (str, os.PathLike)) else ""
    return (
        f"the disk refused{where}: {os.strerror(number)}; fix that (space, permissions, quota, name). "
        "What was written before is intact, and a run continues with --resume."
    )
