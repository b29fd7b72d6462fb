"""The one exception that means "the user can fix this"."""

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_TEXT = 500  # the most characters that are shown of an object of a user or a library


class InputError(ValueError):
    """What is wrong, where, and how to fix it, in one sentence; the command line prints it and exits with 2."""


class DivergedError(InputError):
    """Training ended in numbers (`what`) that are not finite: a result of the settings, the learning rate above all."""

    def __init__(self, message: str, what: str = "number") -> None:
        super().__init__(message)
        self.what = what


def check_finite(what: str, values: Any) -> None:
    """Raise DivergedError if a value is NaN or infinite: the policy has diverged, rather than settings being wrong."""
    if not values.isfinite().all():
        raise DivergedError(f"training has diverged: a {what} is NaN or infinite; lower learning_rate.", what)


def check_current_folder() -> None:
    """Refuse to work in a folder that no longer exists: libraries fail there when they load."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder no longer exists; change to one that does.") from None


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this Python; pip reads what it is from the package that is installed."""
    return f"{shlex.quote(sys.executable)} -m pip install 'oblrpo[{extra}]'"


def shown(words: Callable[[Any], str], thing: Any) -> str:
    """What `words`, str or repr, say of a thing: cut, and without halves of surrogate pairs, which no file can hold."""
    try:
        text = words(thing)[: LONGEST_TEXT + 1].encode("utf-8", "backslashreplace").decode()
    except Exception:  # it may raise anything
        return f"a {type(thing).__name__} that cannot be shown"
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the choice that is closest to a word, or nothing if none is close."""
    close = difflib.get_close_matches(str(word)[:100], [str(choice)[:100] for choice in choices], n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def nearby(path: Path) -> str:
    """` Did you mean 'x'?` for the name in a path's folder that is closest to its own, or nothing if none is close."""
    with suppress(OSError, ValueError):
        return did_you_mean(path.name, os.listdir(path.parent))
    return ""


def check_folder(path: Path) -> None:
    """Refuse a folder that is not there."""
    if not os.path.isdir(path):
        what, close = ("not a folder", "") if os.path.exists(path) else ("not there", nearby(path))
        raise InputError(f"{path} is {what}; give the folder of a run.{close}")
