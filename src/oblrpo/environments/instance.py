"""One environment with its tools, in the process or thread that it lives in."""

import asyncio
import inspect
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, shown
from oblrpo.rewards.user import plain_reward
from oblrpo.workers import LONGEST

GRACE = 2  # seconds in which a call that was interrupted may end; then its process is killed
OWN = ("reset", "get_reward")
"""Methods of an environment that are no tools."""


class Late(BaseException):
    """The time of a call is up; no `except Exception` of a tool catches it."""


class Instance:
    """An environment that was made once and is reset for every episode, or none, and its tools by name.

    Args:
        factory: a class, or whatever returns an environment; None: there are tools alone.
        functions: further tools.
        longest: characters of a result that the policy reads; what is beyond them is cut.
        interrupts: whether this is the main thread of a process of its own, where a late call can be interrupted.
    """

    def __init__(
        self,
        factory: Callable[[], Any] | None,
        functions: Sequence[Callable[..., Any]] = (),
        longest: int = sys.maxsize,
        interrupts: bool = False,
    ) -> None:
        self.environment: Any = factory() if factory else None
        self.longest, self.interrupts = longest, interrupts
        self.tools = tools_of(self.environment, functions)
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return {"text": what the policy reads} of a `reset` or a `call`, or {"value": the reward}.

        `failed` says what went wrong: of a call it stands beside the text of the error, which the policy reads.
        """
        try:
            with _alarm(seconds) if self.interrupts else nullcontext():
                if "call" in message:
                    tool = self.tools.get(name := message["call"], partial(_not_found, name))
                    result = self._awaited(tool(**message["arguments"]))
                    return {"text": self._text(result)} if not has_images(result) else {"images": True}
                if "value" in message:
                    return {"value": plain_reward(self._awaited(self.environment.get_reward()))}
                self._seed(message["seed"])
                observed = self._awaited(self.environment.reset(**message["row"])) if self.environment else None
                self._seed(message["seed"] + message["output"])
                if not (observed is None or isinstance(observed, str)):
                    return {"failed": f"returned a {type(observed).__name__}; it may return text, or None"}
                return {"text": _printable(observed or "")}
        except Late:
            what = f"took longer than {seconds:g} s"
        except BaseException as error:  # a tool may raise anything, SystemExit too
            what = f"{type(error).__name__}: {shown(str, error)}"
            if "call" in message:
                return {"text": self._text({"error": shown(str, error)}), "failed": what}
            frames = traceback.extract_tb(error.__traceback__)
            what += f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" * (len(frames) > 1)
        return {"text": self._text({"error": what}), "failed": what}

    def close(self) -> None:
        """Close the event loop, unless a late call is still in it."""
        if self._loop and not self._loop.is_running():
            self._loop.close()

    def _awaited(self, result: Any) -> Any:
        """What a method returned, or what its coroutine returns; all run in one event loop, which clients belong to."""
        if not inspect.iscoroutine(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(result)
        except Late:  # what is pending must not go on in the next call
            self.close()
            self._loop = None
            raise

    def _seed(self, seed: int) -> None:
        """Seed the random numbers of Python, and of NumPy where it is used, in a process of its own."""
        if self.interrupts:
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed % 2**32)

    def _text(self, result: Any) -> str:
        text = str(result)
        if len(text) > self.longest:
            text = f"{text[: self.longest]}... (the first {self.longest:,} of {len(text):,} characters)"
        return _printable(text)


def tools_of(environment: Any, functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return functions, and the public methods of an environment's class, by name."""
    methods = [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if environment is not None and name not in OWN and name[0] != "_"
    ]
    tools: dict[str, Callable[..., Any]] = {}
    for tool in (*functions, *methods):
        if not hasattr(tool, "__name__"):
            raise InputError(f"a tool is a {type(tool).__name__} without a name; give a function.")
        if tools.setdefault(tool.__name__, tool) is not tool:
            raise InputError(f"two tools are called {tool.__name__!r}; rename one of them.")
    return tools


def description(instance: Instance, name: str) -> dict[str, Any]:
    """Return the class of an environment, whether it gives a reward, and the JSON schemas of its tools.

    Raises:
        InputError: it has no `reset` or no tool, or a tool lacks type hints or a description of its arguments.
    """
    from transformers.utils import get_json_schema

    kind = type(instance.environment)
    if instance.environment is not None and not callable(getattr(kind, "reset", None)):
        raise InputError(f"environment '{name}' has no method reset(self, **row), which begins an episode; define it.")
    if not instance.tools:
        raise InputError(f"environment '{name}' has no public method that the policy could call; define one.")
    schemas = []
    for tool, function in instance.tools.items():
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # of transformers' own kinds, whose words say what is missing
            why = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"the tool '{tool}' cannot be described to the policy: {why}. Give its arguments type hints, and a "
                "docstring with a line for each under 'Args:'; or begin its name with _ if it is no tool."
            ) from None
    return {"kind": kind.__name__, "rewards": callable(getattr(kind, "get_reward", None)), "tools": schemas}


def _not_found(name: str, **arguments: Any) -> Any:
    """Stand for a tool that there is not.

    Raises:
        ValueError: always, in TRL's words.
    """
    raise ValueError(f"Tool {name} not found.")


def has_images(result: Any) -> bool:
    """Whether a tool returned blocks of a message with an image among them."""
    return isinstance(result, list) and any(isinstance(each, dict) and each.get("type") == "image" for each in result)


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `Late` in this thread after so many seconds, and end the process if that is ignored."""

    def late(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(GRACE)
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, LONGEST))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
