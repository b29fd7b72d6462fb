"""An end for the code of a chat template, which comes with a model and may loop for years."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from oblrpo.errors import InputError

SECONDS = 60.0
"""How long templates may take; a thousand prompts take a tenth of a second by those that models come with."""

Returned = TypeVar("Returned")


class TooSlow(Exception):  # noqa: N818  (what happened)
    """The time was up."""

    def __str__(self) -> str:
        return f"it takes longer than {SECONDS:g} seconds"


def in_time(function: Callable[[], Returned], seconds: float) -> Returned:
    """Return what a function returns; Python code that takes longer is ended where it stands, in whatever thread.

    One operation of the interpreter's own, such as a power of huge numbers, is waited for.

    Raises:
        InputError: the time was up.
    """
    caller, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()

    def throw(what: Any) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, what)

    def late() -> None:
        with lock:
            if not over.is_set():
                throw(ctypes.py_object(TooSlow))

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        try:
            return function()
        finally:
            timer.cancel()
            with lock:
                over.set()
                throw(None)  # what was thrown and has not arrived
    except TooSlow as error:
        raise InputError(f"the model's chat template is refused: {error}.") from None
