"""The one exception that means "the user can mend this"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class InputError(ValueError):
    """What is wrong, where, and how to mend it, in one sentence; the command line prints it and exits with 2."""


class DivergedError(InputError):
    """Training ended in numbers that are not finite: a result of the settings, the learning rate above all."""


def check_finite(what: str, values: Any) -> None:
    """Tell a policy that has diverged from settings that cannot work.

    Args:
        what: one of the values, in words.
        values: a tensor.

    Raises:
        DivergedError: one of them is NaN or infinite.
    """
    if not values.isfinite().all():
        raise DivergedError(f"training has diverged: a {what} is NaN or infinite; lower learning_rate.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known word, or nothing if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
