"""The one exception that means "the user can mend this"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What is wrong, where, and how to mend it, in one sentence; the command line prints it and exits with 2."""


class DivergedError(InputError):
    """Training ended in numbers that are not finite: a result of the settings, the learning rate above all."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known word, or nothing if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
