"""Reward functions of the user: by path in a process of their own, or given from Python and called in this one."""

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from oblrpo.checksums import sum_of, sum_of_texts
from oblrpo.errors import InputError
from oblrpo.workers import START, Worker, WorkerDied, WorkerLied

Values = Sequence[float | list[str] | None]
"""A value a completion: a finite number, None where the reward does not apply, or [how it looks] if it is neither."""

LARGEST = 1e12  # the largest reward: squares of it, times squared score norms, are still numbers of float32
LONGEST_TEXT = 500  # the most characters that are shown of what a reward raised


class RewardFailed(Exception):  # noqa: N818  (what a reward did)
    """A call of a reward function failed as a whole."""


class WorkerReward:
    """A function found by its path, in a process of its own."""

    digest = ""  # SHA-256 of the files that the function is written in; empty if they cannot be read

    def __init__(self, path: str, seconds: float) -> None:
        """Load the function in its process."""
        self._path, self._seconds = path, seconds
        self._worker = Worker("oblrpo.rewards.worker:main", talkative=True)
        self.close = self._worker.stop
        try:
            reply = self._worker.ask({"path": path}, START)
            refused = reply.get("refused") if isinstance(reply, dict) else "its process answers what is no answer."
        except (TimeoutError, WorkerDied) as error:
            refused = f"reward '{path}' cannot be imported: {error}."
        if refused:
            self.close()
            raise InputError(refused)
        files = reply.get("files")
        with suppress(OSError, TypeError, ValueError):
            if files and all(Path(file).is_file() for file in files):  # no device, of which there is no end
                self.digest = sum_of_texts(sum_of(Path(file)) for file in dict.fromkeys(files))

    def __call__(self, /, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Values:
        """Return the function's values.

        Raises:
            RewardFailed: the function raised, took too long, or ended its process.
            InputError: a column cannot be handed over.
        """
        said = as_said(prompts, completions)
        message = {"path": self._path, "prompts": prompts, "completions": said, "columns": columns}
        try:
            reply = self._worker.ask(message, self._seconds)
        except TimeoutError:
            raise RewardFailed(f"took longer than {self._seconds:g} s (reward_seconds)") from None
        except WorkerLied:
            raise RewardFailed("wrote on the channel of its process, where only answers go") from None
        except WorkerDied:
            raise RewardFailed("ended its process") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"reward '{self._path}' cannot be given all columns of the data: {error}.") from None
        reply = reply if isinstance(reply, dict) else {}
        if what := reply.get("failed") or reply.get("refused"):
            raise RewardFailed(what)
        values: Any = reply.get("values")
        # The function shares its process with what answers for it, and may have spoilt that.
        if not isinstance(values, list) or not all(map(_is_value, values)):
            raise RewardFailed("spoils the answers of its process")
        return values


class PythonReward:
    """A callable of the user's program, called in this process: a column may hold anything, and no call is too long."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.digest = _sum_of_source(function)
        """SHA-256 of the function's source; empty if it cannot be had, as that of a lambda."""

    def __call__(self, /, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Values:
        """Return the function's values; it gets lists of its own, so that what it does to them harms nobody."""
        shown = [prompt if isinstance(prompt, str) else list(map(dict, prompt)) for prompt in prompts]
        own = {name: list(values) for name, values in columns.items()}
        return call_reward(self._function, shown, as_said(prompts, completions), own)


def as_said(prompts: Sequence[Any], completions: Sequence[str]) -> list[Any]:
    """Return completions as TRL hands them over: where a prompt is messages, so is the completion."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def _sum_of_source(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    written = inspect.unwrap(function) if hasattr(function, "__name__") else type(function)
    if getattr(written, "__name__", "") == "<lambda>":  # its source is the whole statement that it stands in
        return ""
    try:
        return sum_of_texts([inspect.getsource(written)])
    except (OSError, TypeError):
        return ""


def call_reward(
    function: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> Values:
    """Return the values of a function in TRL's signature; RewardFailed if it raised, or gave no list."""
    try:
        values = function(prompts=prompts, completions=completions, **columns)
        if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set)):
            return [plain_reward(value) for value in values]
    except Exception as error:  # the user's code may raise anything, a generator only now
        frames = traceback.extract_tb(error.__traceback__)
        raised = f"raised {type(error).__name__}"
        if isinstance(error, TypeError) and len(frames) == 1:  # it was not entered: its parameters do not fit
            names = ", ".join(f"{name}=..." for name in ("prompts", "completions", *columns))
            raise RewardFailed(
                f"{raised}: {_shown(str, error)}; it is called with ({names}), and takes what it does not use as "
                "**columns"
            ) from error
        where = f"{Path(frames[-1].filename).name} line {frames[-1].lineno}"
        raise RewardFailed(f"{raised}: {_shown(str, error)} ({where})") from error
    raise RewardFailed(f"returned a {type(values).__name__}, not a list of numbers")


def plain_reward(value: Any) -> float | list[str] | None:
    """Return a finite number of at most `LARGEST` or None as it is; anything else as [how it looks]."""
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except Exception:  # an object of the user's may raise anything
        number = math.nan
    return number if abs(number) <= LARGEST else [_shown(repr, value)[:100]]  # NaN is no number of any size


def _shown(words: Callable[[Any], str], thing: Any) -> str:
    """What `words`, str or repr, say of a thing: cut, and without halves of surrogate pairs, which no file can hold."""
    try:
        text = words(thing)[: LONGEST_TEXT + 1].encode("utf-8", "backslashreplace").decode()
    except Exception:  # an object of the user's may raise anything
        return f"a {type(thing).__name__} that cannot be shown"
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."


def _is_value(value: Any) -> bool:
    """Whether this is what `plain_reward` returns."""
    if isinstance(value, list):
        return len(value) == 1 and isinstance(value[0], str)
    return value is None or (isinstance(value, float) and abs(value) <= LARGEST)
