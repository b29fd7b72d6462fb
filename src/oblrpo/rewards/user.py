"""Reward functions of the user: by path in a process of their own, or given from Python and called in this one."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.workers import START, Worker, WorkerDied

Values = Sequence[float | list[str] | None]
"""A value a completion: a finite number, None where the reward does not apply, or [how it looks] if it is neither."""


class RewardFailed(Exception):  # noqa: N818  (what a reward did)
    """A call of a reward function failed as a whole."""


class WorkerReward:
    """A function found by its path, in a process of its own."""

    def __init__(self, path: str, seconds: float) -> None:
        """Load the function in its process.

        Raises:
            InputError: there is no such file, module or function, or it fails when it is imported.
        """
        self._path, self._seconds = path, seconds
        self._worker = Worker("oblrpo.rewards.worker:main", talkative=True)
        try:
            refused = self._worker.ask({"path": path}, START).get("refused")
        except (TimeoutError, WorkerDied) as error:
            refused = f"reward '{path}' cannot be imported: {error}."
        if refused:
            self._worker.stop()
            raise InputError(refused)

    def __call__(self, /, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Values:
        """Return the function's values.

        Raises:
            RewardFailed: the function raised, took too long, or ended its process.
            InputError: a column cannot be handed over.
        """
        message = {
            "path": self._path,
            "prompts": prompts,
            "completions": as_said(prompts, completions),
            "columns": columns,
        }
        try:
            reply = self._worker.ask(message, self._seconds)
        except TimeoutError:
            raise RewardFailed(f"took longer than {self._seconds:g} s (reward_seconds)") from None
        except WorkerDied:
            raise RewardFailed("ended its process") from None
        except TypeError as error:
            raise InputError(f"reward '{self._path}' cannot be given all columns of the data: {error}.") from None
        if what := reply.get("failed") or reply.get("refused"):
            raise RewardFailed(what)
        values: Values = reply["values"]
        return values

    def close(self) -> None:
        """End the process."""
        self._worker.stop()


class PythonReward:
    """A callable of the user's program, called in this process: a column may hold anything, and no call is too long."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, /, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> Values:
        """Return the function's values; it gets lists of its own, so that what it does to them harms nobody.

        Raises:
            RewardFailed: the function raised, or returned no list.
        """
        shown = [prompt if isinstance(prompt, str) else [dict(each) for each in prompt] for prompt in prompts]
        own = {name: list(values) for name, values in columns.items()}
        return call_reward(self._function, shown, as_said(prompts, completions), own)


def as_said(prompts: Sequence[Any], completions: Sequence[str]) -> list[Any]:
    """Return completions as TRL hands them over: where a prompt is messages, so is the completion."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def call_reward(
    function: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> Values:
    """Return the values of a function in TRL's signature.

    Raises:
        RewardFailed: the function raised, or returned no list; what it raised is the cause.
    """
    try:
        values = function(prompts=prompts, completions=completions, **columns)
        if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set)):
            return [plain_reward(value) for value in values]
    except Exception as error:  # the user's code may raise anything, a generator only now
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TypeError) and len(frames) == 1:  # it was not entered: its parameters do not fit
            names = ", ".join(f"{name}=..." for name in ("prompts", "completions", *columns))
            raise RewardFailed(
                f"raised TypeError: {error}; it is called with ({names}), and takes what it does not use as **columns"
            ) from error
        frame = frames[-1]
        where = f"{Path(frame.filename).name} line {frame.lineno}"
        raise RewardFailed(f"raised {type(error).__name__}: {error} ({where})") from error
    raise RewardFailed(f"returned a {type(values).__name__}, not a list of numbers")


def plain_reward(value: Any) -> float | list[str] | None:
    """Return a finite number or None as it is; anything else as [how it looks]."""
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return number if math.isfinite(number) else [repr(value)[:100]]
