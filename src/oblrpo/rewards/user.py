"""Reward functions of the user: by path in a process of their own, or given from Python and called in this one."""

import asyncio
import copy
import functools
import inspect
import json
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, shown
from oblrpo.rewards.digest import digest_and_gaps
from oblrpo.tasks.rows import OF_JSON, native
from oblrpo.workers import START, Worker, WorkerDied

Values = Sequence[float | list[str] | None]
"""A value a completion: a finite number, None where the reward does not apply, or [how it looks] if it is neither."""

ANY = "**"  # stands for `**columns` among the names of what a function takes
LARGEST = 1e12  # the largest reward: squares of it, times squared score norms, are still numbers of float32


class RewardFailed(Exception):  # noqa: N818  (what a reward did)
    """A call of a reward function failed as a whole."""


class WorkerReward:
    """A function named by its path, in a process of its own."""

    def __init__(self, path: str, seconds: float) -> None:
        """Load the function in its process."""
        self._path, self._seconds = path, seconds
        self._worker = Worker("oblrpo.rewards.worker:main", talkative=True)
        self.close = self._worker.stop
        try:
            reply = self._worker.ask({"path": path}, START)
            refused = reply.get("refused")
        except (TimeoutError, WorkerDied) as error:
            refused = f"reward '{path}' cannot be imported: {error}."
        if refused:
            self.close()
            raise InputError(refused)
        self.waits, self.takes, digest = reply["waits"], frozenset(reply["takes"]), reply["digest"]
        self._withheld: dict[str, str] = {}  # columns that were left out, and why
        self.digest_and_gaps = lambda: (digest, () if digest else ("its file",))

    def __call__(self, /, **given: Any) -> Values:
        """Return the function's values; RewardFailed if it raised, took too long, or its process failed."""
        given["completions"] = as_messages(given["prompts"], given["completions"])
        handed = {name: given[name] for name in accepted(given, self.takes) if name not in self._withheld}
        message = {"path": self._path, "given": handed}
        try:
            try:
                reply = self._worker.ask(message, self._seconds)
            except (TypeError, ValueError, RecursionError):
                self._withhold(handed, given["prompts"])
                reply = self._worker.ask(message, self._seconds)
        except TimeoutError:
            raise RewardFailed(f"took longer than {self._seconds:g} s (reward_seconds)") from None
        except WorkerDied as error:
            raise RewardFailed(f"failed: {error}") from None
        if what := reply.get("failed") or reply.get("refused"):
            raise RewardFailed("; ".join([what, *self._withheld.values()]))
        values: Values = reply["values"]
        return values

    def _withhold(self, given: dict[str, Any], prompts: Sequence[Any]) -> None:
        """Leave out the columns that JSON cannot hold; InputError where the function has one of them by its name."""
        for name in list(given):
            given[name] = native(given[name])
            for value, prompt in zip(given[name], prompts, strict=False):
                try:
                    json.dumps(value)
                except (TypeError, ValueError, RecursionError) as error:
                    what = f"column '{name}' ({type(value).__name__}) cannot be handed to its process"
                    if name in self.takes:
                        raise InputError(
                            f"reward '{self._path}': {what} ({shown(str, error)}), first in the row of the prompt "
                            f"{str(prompt)[:40]!r}; make it text or numbers, or give the reward from Python as a "
                            "callable."
                        ) from None
                    self._withheld[name] = f"{what}, and is left out"
                    del given[name]
                    break


class PythonReward:
    """A callable of the user's program, called in this process: a column may hold anything, and no call is too long."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.takes, self.waits = takes(function), waits(function)
        self.digest_and_gaps = lambda: digest_and_gaps(function)

    def __call__(self, /, **given: Any) -> Values:
        """Return the function's values; every completion has a copy of its row, which it may change."""
        given["completions"] = as_messages(given["prompts"], given["completions"])
        return call_reward(self._function, {name: copied(list(values)) for name, values in given.items()})


def copied(value: Any) -> Any:
    """Return a value with containers and arrays of its own; what else these hold, such as an image, is shared."""
    if isinstance(value, (list, dict)):
        value = copy.copy(value)
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = item if type(item := value[key]) in OF_JSON else copied(item)
    elif type(value) is tuple:
        return tuple(map(copied, value))
    return copy.deepcopy(value) if isinstance(value, (set, bytearray)) or hasattr(value, "tolist") else value


def as_messages(prompts: Sequence[Any], completions: Sequence[str]) -> list[Any]:
    """Return completions as TRL passes them: where a prompt is messages, so is the completion."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def takes(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of what a function can be called with, `ANY` among them where it takes whatever there is."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # one of a library in C
        return frozenset({ANY})
    names = {each.name for each in parameters if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}}
    return frozenset(names | {ANY for each in parameters if each.kind is each.VAR_KEYWORD})


def accepted(given: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the names among `given` that a function with these parameters accepts."""
    return [name for name in given if name in names or ANY in names]


def waits(function: Callable[..., Any]) -> bool:
    """Return whether a function is `async def`, or an object whose call is."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of async rewards, one for good: what they open, such as a client, belongs to it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _awaited(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await value, None
    except BaseException as error:  # SystemExit would end the loop, and leave us waiting
        return None, error


def call_reward(function: Callable[..., Any], given: Mapping[str, Any]) -> Values:
    """Return the values of a function in TRL's signature; RewardFailed if it raised, or gave no list.

    It gets those of `given` that it names: prompts, completions, completion_ids and the columns of the data.
    """
    try:
        values = function(**{name: given[name] for name in accepted(given, takes(function))})
        if inspect.isawaitable(values):
            values, error = asyncio.run_coroutine_threadsafe(_awaited(values), _loop()).result()
            if error is not None:
                raise error
        if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set)):
            return [plain_reward(value) for value in values]
    except Exception as error:  # the user's code may raise anything, a generator only now
        frames = traceback.extract_tb(error.__traceback__)
        raised = f"raised {type(error).__name__}"
        if isinstance(error, TypeError) and len(frames) == 1:  # it was not entered: its parameters do not fit
            raise RewardFailed(f"{raised}: {shown(str, error)}; it can be given {', '.join(given)}") from error
        where = f"{Path(frames[-1].filename).name} line {frames[-1].lineno}"
        raise RewardFailed(f"{raised}: {shown(str, error)} ({where})") from error
    raise RewardFailed(f"returned a {type(values).__name__}, not a list of numbers")


def plain_reward(value: Any) -> float | list[str] | None:
    """Return a finite number of at most `LARGEST` or None as it is; anything else as [how it looks]."""
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except Exception:  # an object of the user's may raise anything
        number = math.nan
    return number if abs(number) <= LARGEST else [shown(repr, value)[:100]]  # NaN is no number of any size
