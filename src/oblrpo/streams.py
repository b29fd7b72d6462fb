"""Standard output and error that end no run: where they are closed, read by nobody, or know few characters."""

import codecs
import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

PLAIN = "oblrpo-plain"  # the name of the error handler by which `encode` writes plainly what an encoding does not have
_GONE = {errno.EPIPE, errno.EIO}
"""What writing fails with where nobody reads any more: the other end of a pipe, a terminal that was closed."""

_SHOWN = {"±": "+-", "…": "...", "·": "-", "—": "-", "→": "->", "²": "^2"}


def _letters(error: UnicodeError) -> tuple[str, int]:
    """Return for each character the nearest in ASCII, else an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_SHOWN.get(each) or each.encode("ascii", "backslashreplace").decode() for each in letters), error.end


codecs.register_error(PLAIN, _letters)


class _Steady(io.TextIOWrapper):
    """A stream that writes every character, plainly where it must; `keep_running` ignores that nobody reads it."""

    keep_running = True

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._ignore_gone(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._ignore_gone(error)

    def _ignore_gone(self, error: OSError) -> None:
        """Discard all later output if the reader is gone and `keep_running`; raise any other error."""
        if not self.keep_running or error.errno not in _GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def install_streams(keep_running: bool = True) -> None:
    """Put such streams in the place of this process's; a replacement by another library stays.

    A descriptor 0, 1 or 2 that is closed leads to nowhere from now on. Else the next file that is opened would get its
    number, and what libraries and other processes print would go into that file. With `keep_running` the process
    continues when nobody reads its output; its errors never end it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    for name, number in (("stdout", 1), ("stderr", 2)):
        before: Any = getattr(sys, name)
        if before is getattr(sys, f"__{name}__"):
            if before is not None:
                with suppress(OSError):
                    before.flush()  # or what it holds would come after what is written from now on
            raw = open(number, "wb", closefd=False) if before is None else before.buffer  # noqa: SIM115
            stream = _Steady(
                raw,
                encoding=getattr(before, "encoding", "utf-8"),
                errors=PLAIN,
                line_buffering=name == "stderr" or getattr(before, "line_buffering", False),
                write_through=getattr(before, "write_through", False),
            )
            stream.keep_running = keep_running or name == "stderr"
            setattr(sys, name, stream)
