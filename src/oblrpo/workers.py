"""Fresh interpreters that answer JSON lines: what may hang, crash or eat memory runs there, and is killed when late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from oblrpo.errors import InputError

START = 120.0
"""Seconds for a worker to start: it imports its libraries, on a busy machine."""

LONGEST = 2.0**30
"""Seconds; a longer time is cut to this, for timers take no number of any size."""


def cores() -> int:
    """CPU cores that this process may use; where the system does not say (macOS), those there are."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class WorkerDied(RuntimeError):  # noqa: N818  (what happened, not an error of ours)
    """The process ended before it answered: out of memory, a fault of the interpreter, a call of exit."""


class Worker:
    """One process, started when first asked and again after it was killed; never a fork of the one that holds torch.

    Args:
        main: `package.module:function`, which calls `serve`.
        talkative: let what it prints reach our standard error.
        environment: variables that are not as they are here.
    """

    def __init__(self, main: str, talkative: bool = False, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        self._code = f"from {module} import {function}; {function}()"
        self._main, self._talkative, self._environment = main, talkative, dict(environment or {})
        self._process: subprocess.Popen[str] | None = None

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message, both as JSON has them.

        Raises:
            TimeoutError: there was none after `seconds`; the process was killed.
            WorkerDied: the process ended.
            InputError: it does not start.
        """
        seconds = min(seconds, LONGEST)
        if self._process is None:
            self._start()
        return self._exchange(json.dumps([message, seconds]), seconds)

    def stop(self) -> None:
        """Kill the process, and what it has started."""
        if self._process is not None:
            _kill(self._process)
            for stream in (self._process.stdin, self._process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:  # what was not written is lost with the process
                    pass
            self._process.wait()
            self._process = None

    def __del__(self) -> None:
        self.stop()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        # The worker finds what we find, and nothing in the current folder takes a module's place.
        found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._talkative else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=os.environ | found | self._environment,
            start_new_session=True,  # a group of its own, for `_kill`
        )
        try:
            self._exchange(None, START)
        except (TimeoutError, WorkerDied):
            raise InputError(
                f"the worker {self._main} does not start; try: {sys.executable} -c '{self._code}'"
            ) from None

    def _exchange(self, line: str | None, seconds: float) -> Any:
        """Send a line and return the reply; the process is killed when the time is up.

        Raises:
            TimeoutError: it was.
            WorkerDied: it ended by itself.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            if line is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:  # it died before it read
            reply = ""
        finally:
            timer.cancel()
            timer.join()  # the process's number may be another's once `stop` has waited for it
        if late.is_set() or not reply:
            self.stop()
        if reply.endswith("\n"):
            return json.loads(reply)
        if late.is_set():
            raise TimeoutError(f"no answer after {seconds:g} s")
        raise WorkerDied("the process ended before it answered")


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process nobody has waited for and its group: a child it left would hold the pipe that we read from."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # Windows has no groups; this one may have ended
        process.kill()


def serve(answer: Callable[[Any], Any], memory: int | None = None) -> None:
    """In the process: say "ready", then answer message by message until the input ends.

    What `answer` prints goes to standard error; there is nothing for it to read. `memory`: bytes of address space it
    may use.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer: its step in progress ends first
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing a library prints may come between the replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor may it, or a process it starts, wait for a request
    if memory is not None:
        _limit_memory(memory)
    print(json.dumps("ready"), file=replies, flush=True)
    for line in requests:
        message, seconds = json.loads(line)
        _end_after(seconds)
        reply = answer(message)
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


def _end_after(seconds: float) -> None:
    """Have the system end this process a little later than the parent would, in case the parent is gone."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(int(seconds) + 3)


def _limit_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
