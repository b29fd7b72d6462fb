"""The one exception that means "the user can mend this"."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """What is wrong, where, and how to mend it, in one sentence; the command line prints it and exits with 2."""


class DivergedError(InputError):
    """Training ended in numbers that are not finite: a result of the settings, the learning rate above all.

    Args:
        message: the sentence.
        what: the number, in words.
    """

    def __init__(self, message: str, what: str = "number") -> None:
        super().__init__(message)
        self.what = what


def check_finite(what: str, values: Any) -> None:
    """Tell a policy that has diverged from settings that cannot work.

    Args:
        what: one of the values, in words.
        values: a tensor.

    Raises:
        DivergedError: one of them is NaN or infinite.
    """
    if not values.isfinite().all():
        raise DivergedError(f"training has diverged: a {what} is NaN or infinite; lower learning_rate.", what)


_OF_THE_DISK = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EIO,
    errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
}  # fmt: skip


def disk_trouble(error: Exception) -> str:
    """What the disk refused, in a sentence, if that is what an error says, also one of a library written in Rust."""
    number, name = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])
    anything = {errno.EACCES, errno.EPERM, errno.EIO}  # unless a file is named: a terminal, a socket, a device
    if number not in _OF_THE_DISK or (number in anything and name is None):
        return ""
    where = f" {str(name)[:200]!r}" if isinstance(name, (str, os.PathLike)) else ""
    return (
        f"the disk refused{where}: {os.strerror(number)}; mend that (room, permissions, a limit, another name), then "
        "go on: what was written before is whole, and a run goes on with --resume."
    )


def check_current_folder() -> None:
    """Refuse to work in a folder that is gone: libraries fail there when they load.

    Raises:
        InputError: somebody removed it.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder is gone: somebody has removed it; go to one that is there.") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known word, or nothing if none is close."""
    close = difflib.get_close_matches(str(word)[:100], [str(each)[:100] for each in known], n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
