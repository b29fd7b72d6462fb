"""Processes for code that may hang, crash or use up memory. They answer JSON lines, and are killed when late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from oblrpo.errors import InputError

START = 120.0
"""Seconds that a worker may take to start: it imports its libraries, perhaps on a busy machine."""

LONGEST = 2.0**30
"""The longest time limit in seconds; a longer one is cut to it, because timers overflow."""


class WorkerDied(RuntimeError):  # noqa: N818  (what happened, not an error of ours)
    """The process ended before it answered: out of memory, a fault of the interpreter, a call of exit."""


class Worker:
    """A process that starts when it is first asked, and again after it was killed.

    It is a fresh interpreter, never a fork of the process that holds torch.

    Args:
        main: the function to run there, as `package.module:function`; it calls `serve`.
        talkative: whether what it prints reaches our standard error.
        environment: environment variables in which it differs from this process.
    """

    def __init__(self, main: str, talkative: bool = False, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        self._code = f"from {module} import {function}; {function}()"
        self._main, self._talkative, self._environment = main, talkative, dict(environment or {})
        self._process: subprocess.Popen[str] | None = None

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message; both are anything that JSON can hold.

        Raises:
            TimeoutError: there was none after `seconds`; the process was killed.
            WorkerDied: the process ended.
            InputError: the process does not start.
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

    def __exit__(self, *_: object) -> None:
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
            TimeoutError: the time was up.
            WorkerDied: the process ended by itself.
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
    """Kill a process and its group: a child that it left behind would hold the pipe that we read from."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # Windows has no groups; this one may have ended
        process.kill()


def serve(answer: Callable[[Any], Any], memory: int | None = None) -> None:
    """Say "ready", then answer message by message until the input ends. This is what the process runs.

    Whatever `answer` prints goes to standard error, and it has nothing to read. `memory` is the address space that the
    process may use, in bytes.
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
    """Have the system end this process a little later than its parent would, in case the parent is gone."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(int(seconds) + 3)


def _limit_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
