"""Processes for code that may hang, crash or use up memory. They answer JSON lines, and are killed when late.

`in_thread` is for code that has to run in this process, without waiting for it.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from oblrpo.errors import InputError
from oblrpo.streams import install_streams

START = 120.0  # seconds that a worker may take to start: it imports its libraries, perhaps on a busy machine
LONGEST = 2.0**20  # the longest time limit in seconds, twelve days; a longer one is cut to it, because timers overflow
MARK = "OBLRPO_WORKER"  # the environment variable by which a worker's processes are known, in whatever session they are

T = TypeVar("T")


def in_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread of its own, which does not delay the end of the program."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # SystemExit, too, is for the caller to handle
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def cores() -> int:
    """CPU cores that this process may use; where the system does not say (macOS), those there are."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class WorkerDied(RuntimeError):  # noqa: N818  (what happened, not an error of ours)
    """The process ended (out of memory, a fault of the interpreter, a call of exit), or its reply cannot be read."""


class Worker:
    """A process that starts at the first question, and again after it was killed.

    It is a fresh interpreter, never a fork of the process that holds torch. It runs `main`, as
    `package.module:function`, which calls `serve`. What a `talkative` one prints reaches our standard error.
    """

    def __init__(self, main: str, talkative: bool = False, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        self._code = f"from {module} import {function}; {function}()"
        self._main, self._talkative, self._environment = main, talkative, dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket
        self._mark = self._folder = ""
        with suppress(OSError):  # where it starts, however often: this process may go elsewhere, or that may be gone
            self._folder = os.getcwd()

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message; both are anything that JSON can hold.

        Raises:
            TimeoutError: there was none after `seconds`; the process was killed.
            WorkerDied: the process ended, or was killed because its reply cannot be read.
        """
        seconds = min(seconds, LONGEST)
        request = json.dumps([message, seconds]).encode() + b"\n"
        if self._process is None:
            self._start()
        return self._exchange(request, seconds)

    def stop(self) -> None:
        """Kill the process, and what it has started."""
        if self._process is not None:
            self._end()
            self._process = None

    def _start(self) -> None:
        # The worker finds what we find, and nothing in the current folder takes a module's place.
        self._mark = secrets.token_hex(8)
        path = os.pathsep.join(filter(None, sys.path))
        ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", MARK: self._mark}
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._code],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=None if self._talkative else subprocess.DEVNULL,
                env=os.environ | ours | self._environment,
                cwd=self._folder if os.path.isdir(self._folder) else None,
                start_new_session=True,  # a group of its own, for `end_tree`
            )
        # Called at the end of the program, too, while the modules that it needs are still there.
        self._end = weakref.finalize(self, _end, self._process, self._channel, self._mark)
        try:
            self._exchange(b"", START)
        except (TimeoutError, WorkerDied):
            raise InputError(f"worker {self._main} does not start; try: {sys.executable} -c '{self._code}'") from None

    def _exchange(self, request: bytes, seconds: float) -> Any:
        """Send a request and return the reply to it; the process is killed if none comes, or something stops us."""
        try:
            return exchange(self._channel, request, seconds)
        except BaseException:  # after a Ctrl-C, too: the next request must not get the reply to this one
            self.stop()
            raise


def exchange(channel: socket.socket, request: bytes, seconds: float) -> Any:
    """Send a request over a socket and return the reply to it; where none comes, the socket is of no further use.

    Raises:
        TimeoutError: there was none after `seconds`.
        WorkerDied: the other side has ended, or sends no JSON.
    """
    channel.settimeout(min(seconds, LONGEST))
    try:
        if request:  # else the other side speaks first, and may have ended since
            channel.sendall(request)
        with channel.makefile("rb") as replies:
            reply = replies.readline()
    except TimeoutError:
        raise TimeoutError(f"no answer after {seconds:g} s") from None
    except OSError:
        reply = b""
    if not reply.endswith(b"\n"):
        raise WorkerDied("its process ended before it answered")
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        raise WorkerDied("its process sent an invalid reply") from None


def _end(process: subprocess.Popen[bytes], channel: socket.socket, mark: str) -> None:
    end_tree(process.pid, mark)
    process.kill()
    process.wait()
    channel.close()


def serve(answer: Callable[[Any], Any], memory: int | None = None) -> None:
    """Say that it is ready, then answer message by message until the parent is gone. This is what the process runs.

    Whatever `answer` prints goes to standard error, and it has nothing to read. `memory` is the address space that the
    process may use, in bytes. What it has started ends with it. A fork of it that comes back from `answer` ends there.
    """
    install_streams()  # before anything is opened: its parent's standard error may be closed, or nobody may read it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer: its step in progress ends first
    global _channel
    _channel = channel = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)  # what a library prints
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # neither it nor a process that it starts may wait for a request
    if memory is not None:
        import resource  # not on Windows

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    own = os.getpid()
    channel.sendall(b"null\n")
    with suppress(ConnectionError):  # the parent is gone
        for line in channel.makefile("rb"):
            message, seconds = json.loads(line)
            signal.alarm(int(seconds) + 3)  # later than the parent would end this process, in case it is gone
            reply = answer(message)
            if os.getpid() != own:
                os._exit(0)
            signal.alarm(0)
            channel.sendall(json.dumps(reply).encode() + b"\n")
    end_tree(own, os.environ.get(MARK, ""))


_channel: socket.socket | None = None  # of a process that serves


def leave_channel() -> None:
    """Let a fork of a process that serves close the channel, whose end would else not be noticed."""
    if _channel is not None:
        _channel.close()


def end_tree(pid: int, mark: str) -> None:
    """Kill a process, its group, its descendants, and whatever carries `mark` in its environment, but not the caller.

    Only a process that was orphaned, in a session and an environment of its own, is missed.
    """
    killed = True
    while killed:  # one may start another while we look
        killed, there = False, {each.pid: each for each in psutil.process_iter(["environ", "ppid"])}
        tree = {own for own, each in there.items() if own == pid or (each.info["environ"] or {}).get(MARK) == mark}
        while below := {own for own, each in there.items() if each.info["ppid"] in tree} - tree:
            tree |= below
        for own in tree - {os.getpid()}:
            with suppress(psutil.Error):  # it has ended
                if there[own].status() != psutil.STATUS_ZOMBIE:
                    there[own].kill()
                    killed = True
    with suppress(AttributeError, OSError):  # Windows has no groups; this one may have ended
        os.killpg(pid, signal.SIGKILL)
