"""Ctrl-C: the first ends a command in order, a second one at once, with one sentence and exit code 130."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

STOPPED = 130  # the exit code


def catch() -> None:
    """Take Ctrl-C over, unless another handler is there, or this process is to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # another thread than the main one
            signal.signal(signal.SIGINT, _first)
            sys.unraisablehook = _swallowed


def caught() -> bool:
    """Whether there was a Ctrl-C, whatever libraries have made of it since."""
    return signal.getsignal(signal.SIGINT) in {_further, _silent}


def report(why: str) -> None:
    """Say what is left of the command; from now on a Ctrl-C needs no word."""
    from oblrpo.report.html import seen

    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # else one that comes now would end it without a word
    print(f"oblrpo: {seen(why or 'interrupted.')}", file=sys.stderr, flush=True)
    with suppress(ValueError):
        signal.signal(signal.SIGINT, _silent)


def _first(number: int, frame: FrameType | None) -> None:
    """End in order; but at once while libraries load, where there is nothing to save and they may swallow it."""
    signal.signal(signal.SIGINT, _further)
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            _further(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def _further(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    for stream in (1, 2):
        with suppress(OSError):  # not by `print`, which may be what was interrupted
            os.write(stream, b"\x1b[?25h" if os.isatty(stream) else b"")  # a bar hides the cursor
    with suppress(OSError):
        os.write(2, b"oblrpo: interrupted.\n")
    os._exit(STOPPED)


def _silent(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(STOPPED)


def _swallowed(unraisable: Any) -> None:
    """End at once where a KeyboardInterrupt came that nobody would see, as in a callback of the garbage collector."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt) and caught():
        _further()
    sys.__unraisablehook__(unraisable)
