"""Reward functions of the user: by path in a process of their own, or given from Python and called in this one.

What one is, its source and the values that it carries, is kept as one digest.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
import re
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from numbers import Number
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from oblrpo.checksums import sum_of_texts
from oblrpo.errors import InputError, shown
from oblrpo.tasks.episode import Episode
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
    elif isinstance(value, tuple):
        return getattr(type(value), "_make", tuple)(map(copied, value))  # of a namedtuple
    return copy.deepcopy(value) if isinstance(value, (set, bytearray, deque)) or hasattr(value, "tolist") else value


def as_messages(prompts: Sequence[Any], completions: Sequence[str | Episode]) -> list[Any]:
    """Return completions as TRL passes them: an episode is messages, and where a prompt is, so is the completion."""
    return [
        list(said)
        if isinstance(said, Episode)
        else said
        if isinstance(prompt, str)
        else [{"role": "assistant", "content": said}]
        for prompt, said in zip(prompts, completions, strict=True)
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


PLAIN = (type(None), str, bytes, Number, date, time, timedelta, PurePath, range)
"""Types whose values are all that their repr says."""


def digest_and_gaps(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return the SHA-256 of a callable's source, defaults, bound arguments, attributes and what it encloses.

    Beside it stands what of these has no part in it: a source that cannot be had, and what is no plain value.
    """
    unknown: dict[str, None] = {}
    try:
        return sum_of_texts([_described(function, "", unknown, ())]), tuple(unknown)
    except Exception:  # an object of the user's may raise anything
        return "", ("all of it",)


def _described(thing: Any, place: str, unknown: dict[str, None], holders: tuple[int, ...]) -> str:
    """Describe a thing; parts that cannot be described go to `unknown`, by their place."""
    if isinstance(thing, Enum):  # whose repr may hold an address
        thing = [type(thing).__qualname__, thing.name, thing.value]
    if isinstance(thing, int):
        return hex(thing)  # a long one has no repr
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in holders:
        return "itself"
    holders = (*holders, id(thing))

    def described(part: Any, name: object = "") -> str:
        return _described(part, ".".join(filter(None, (place, str(name)))), unknown, holders)

    if isinstance(thing, Mapping):
        return f"{{{', '.join(sorted(f'{described(key)}: {described(value, key)}' for key, value in thing.items()))}}}"
    if isinstance(thing, (list, tuple)):
        return f"[{', '.join(map(described, thing))}]"
    if isinstance(thing, (set, frozenset)):
        return f"({', '.join(sorted(map(described, thing)))})"
    if isinstance(thing, FunctionType):
        defaults, enclosed = {"defaults": thing.__defaults__}, inspect.getclosurevars(thing).nonlocals
        return described([thing.__code__, defaults, thing.__kwdefaults__, enclosed])
    if isinstance(thing, (CodeType, type)):
        if not (source := _source(thing)):
            unknown[f"the source of {place}" if place else "the source"] = None
        return source
    if isinstance(thing, re.Pattern):
        return described([thing.pattern, thing.flags])
    if isinstance(thing, functools.partial):
        return described([thing.func, {"arguments": thing.args}, thing.keywords])
    if isinstance(thing, MethodType):
        return described([thing.__func__, thing.__self__])
    if isinstance(thing, BuiltinFunctionType):
        owner = thing.__self__
        return thing.__qualname__ + (str(owner.__name__) if isinstance(owner, ModuleType) else described(owner))
    if type(thing).__module__ == "functools":  # cache
        return described(thing.__wrapped__)
    if place and not is_dataclass(thing):  # of objects the reward itself is looked into, and data classes
        unknown[f"{place} ({type(thing).__name__})"] = None
        return type(thing).__qualname__
    slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__"]
    values = {name: getattr(thing, name, None) for name in slots} | getattr(thing, "__dict__", {})
    return described(type(thing)) + described(values)


@functools.cache  # the file may be edited during a run
def _source(written: CodeType | type) -> str:
    """Return the source of a function's code, or of a class; none of a lambda, whose source is its entire statement."""
    try:
        return inspect.getsource(written) if getattr(written, "co_name", "") != "<lambda>" else ""
    except (OSError, TypeError):
        return ""
