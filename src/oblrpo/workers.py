"""Processes for code that may hang, crash or use up memory. They answer JSON lines, and are killed when late.

Every request carries a word of its own, which its answer must repeat: what a process says unasked is no answer.
`begun` is for code that has to run in this process: nobody need wait for it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from oblrpo.errors import InputError
from oblrpo.streams import steady

START = 120.0  # seconds that a worker may take to start: it imports its libraries, perhaps on a busy machine
LONGEST = 2.0**30  # the longest time limit in seconds; a longer one is cut to it, because timers overflow
LONGEST_REPLY = 1 << 26
"""The most characters of a reply; more is none, so that no process can fill the memory of this one."""

MARK = "OBLRPO_WORKER"  # the environment variable by which a worker's processes are known, in whatever session they are
CHANNEL = 500
"""The least number of the descriptors a worker answers on, out of the way of what its function opens and closes."""

T = TypeVar("T")


def begun(function: Callable[..., T], *args: Any) -> Future[T]:
    """A call that goes on in a thread of its own, which does not hold up the end of the program."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # SystemExit, too, is the caller's to judge
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def cores() -> int:
    """CPU cores that this process may use; where the system does not say (macOS), those there are."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class WorkerDied(RuntimeError):  # noqa: N818  (what happened, not an error of ours)
    """The process ended before it answered: out of memory, a fault of the interpreter, a call of exit."""


class WorkerLied(WorkerDied):
    """Something else than the answer came over the channel; the process was killed."""


class Worker:
    """A process that starts when it is first asked, and again after it was killed.

    It is a fresh interpreter, never a fork of the process that holds torch. It runs `main`, as
    `package.module:function`, which calls `serve`. What a `talkative` one prints reaches our standard error.
    """

    def __init__(self, main: str, talkative: bool = False, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        self._code = f"from {module} import {function}; {function}()"
        self._main, self._talkative, self._environment = main, talkative, dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._mark = self._folder = ""
        with suppress(OSError):  # where it starts, however often: this process may go elsewhere, or that may be gone
            self._folder = os.getcwd()

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message; both are anything that JSON can hold.

        Raises:
            TimeoutError: there was none after `seconds`; the process was killed.
            WorkerDied: the process ended.
            WorkerLied: it said something else than one answer; it was killed.
        """
        seconds = min(seconds, LONGEST)
        if self._process is None:
            self._start()
        word = secrets.token_hex(8)
        return self._exchange(json.dumps([word, message, seconds]), seconds, word)

    def stop(self) -> None:
        """Kill the process, and what it has started."""
        if self._process is not None:
            self._kill(self._process)
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                with suppress(OSError):  # what was not written is lost with the process
                    stream.close()
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
        self._mark = secrets.token_hex(8)
        path = os.pathsep.join(filter(None, sys.path))
        ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", MARK: self._mark}
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._talkative else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=os.environ | ours | self._environment,
            cwd=self._folder if os.path.isdir(self._folder) else None,
            start_new_session=True,  # a group of its own, for `end_tree`
        )
        try:
            self._exchange(None, START, "ready")
        except (TimeoutError, WorkerDied):
            raise InputError(
                f"the worker {self._main} does not start; try: {sys.executable} -c '{self._code}'"
            ) from None

    def _exchange(self, line: str | None, seconds: float, word: str) -> Any:
        """Send a line and return the reply to it, which carries `word`; the process is killed when the time is up."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._kill(process)

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            if line is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            reply = process.stdout.readline(LONGEST_REPLY)
        except OSError:  # it died before it read
            reply = ""
        except UnicodeDecodeError:
            reply = "what is no text"
        finally:
            timer.cancel()
            timer.join()  # the process's number may be another's once `stop` has waited for it
        if late.is_set() or not reply:
            self.stop()
        if late.is_set() and not reply.endswith("\n"):
            raise TimeoutError(f"no answer after {seconds:g} s")
        if not reply:
            raise WorkerDied("the process ended before it answered")
        with suppress(ValueError, RecursionError):
            said = json.loads(reply)
            if isinstance(said, list) and len(said) == 2 and said[0] == word:
                return said[1]
        self.stop()
        raise WorkerLied("the process sent something other than its answer")

    def _kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a process that nobody has waited for, and what it started: a child would hold the pipe we read from."""
        end_tree(process.pid, self._mark)
        process.kill()


def serve(answer: Callable[[Any], Any], memory: int | None = None) -> None:
    """Say "ready", then answer message by message until the input ends. This is what the process runs.

    Whatever `answer` prints goes to standard error, and it has nothing to read. `memory` is the address space that the
    process may use, in bytes. What it has started ends with it. A fork of it that comes back from `answer` ends there.
    """
    steady()  # before anything is opened: its parent's standard error may be closed, or nobody may read it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer: its step in progress ends first
    requests, replies = os.fdopen(_far(0), encoding="utf-8"), os.fdopen(_far(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing a library prints may come between the replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor may it, or a process it starts, wait for a request
    if memory is not None:
        _limit_memory(memory)
    # Taken now: what runs here may put something else in the place of any function of a module.
    encode, decode, number, end = json.JSONEncoder().encode, json.JSONDecoder().decode, os.getpid, os._exit
    own, mark = number(), os.environ.get(MARK, "")
    alarm = getattr(signal, "alarm", lambda seconds: 0)  # not on Windows
    replies.write(encode(["ready", None]) + "\n")
    replies.flush()
    for line in requests:
        word, message, seconds = decode(line)
        alarm(int(seconds) + 3)  # a little later than the parent would end this process, in case the parent is gone
        reply = answer(message)
        if number() != own:
            end(0)
        alarm(0)
        try:
            replies.write(encode([word, reply]) + "\n")
            replies.flush()
        except (OSError, ValueError):  # somebody closed it
            end(1)
    end_tree(own, mark)


def _far(descriptor: int) -> int:
    """A copy of a descriptor with a high number, which no process that is started inherits."""
    try:
        import fcntl

        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, CHANNEL)
    except (ImportError, OSError):  # Windows, or no number that high is allowed
        return os.dup(descriptor)


def _limit_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))


def end_tree(pid: int, mark: str) -> None:
    """Kill a process, its group, and on Linux all processes that it started.

    These are its descendants and whatever carries `mark` in its environment, in whatever session. Only a process that
    was orphaned, in a session and an environment of its own, is not found.
    """
    for _ in range(20):  # one may start another while we look
        living = _tree(pid, mark)
        for process in living:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not living:
            break
    with suppress(AttributeError, OSError):  # Windows has no groups; this one may have ended
        os.killpg(pid, signal.SIGKILL)


def _tree(pid: int, mark: str) -> set[int]:
    """The living processes that `end_tree` is to end, this one not among them; none where there is no /proc."""
    parents: dict[int, int] = {}
    tree: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    tree.add(int(folder.name))
    tree |= {pid} & parents.keys()
    while further := {process for process, parent in parents.items() if parent in tree} - tree:
        tree |= further
    return tree - {os.getpid()}
