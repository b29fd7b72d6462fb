"""Where environments live: each in a process of its own, or, given as a class by a program, in threads of this one."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import psutil

from oblrpo.environments.instance import GRACE, Instance, description
from oblrpo.errors import InputError, shown
from oblrpo.objects import plain_name
from oblrpo.rewards.user import digest_and_gaps
from oblrpo.workers import LONGEST, START, Worker, WorkerDied, end_tree, exchange, in_thread


class Host(Protocol):
    """One environment, which answers what `Instance.answer` answers."""

    instance: Any
    """What answers where it lives in this process, else None."""
    environment: Any
    """The environment itself, likewise."""

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a message.

        Raises:
            TimeoutError: there was none after `seconds`; the host is of no further use.
            WorkerDied: the process ended; so is it here.
        """
        ...

    def leave(self) -> None:
        """Ask no more."""
        ...

    def end(self) -> None:
        """Ask no more, and end what it has started."""
        ...


class Environments:
    """The environments of a run: what their tools are, and as many as there are episodes at once.

    Named by path, each lives in a process of its own, forked from one that has loaded the file, so that a tool that
    hangs, exits or takes all memory harms its own episode alone. A class or function of a program lives in this
    process, in threads, where nothing can end a call that hangs; its environment is then used no further.

    Args:
        environment: `file.py:Class`, or a word of `objects`; "": there are tools alone, or none at all.
        tools: functions without a state, likewise.
        longest: characters of a result that the policy reads.
        objects: classes and functions of this program by the words that stand for them.

    Raises:
        InputError: they cannot be loaded, or their tools cannot be described.
    """

    def __init__(
        self,
        environment: str = "",
        tools: Sequence[str] = (),
        longest: int = 2000,
        objects: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._hosts: list[Host] = []
        self._free: list[Host] = []
        names, given = [name for name in (environment, *tools) if name], objects or {}
        self._named: dict[str, Any] = {"environment": environment, "tools": list(tools), "longest": longest}
        of_program = [name for name in names if name in given]
        if of_program and len(of_program) < len(names):
            raise InputError(
                f"{', '.join(of_program)} from Python cannot be mixed with tools or environments that are named by "
                "their path; give all of one kind."
            )
        self._make: Callable[[int], list[Host]]
        self._template: Worker | None = None
        self.digests_and_gaps: dict[str, tuple[str, Sequence[str]]] = {}
        """SHA-256 of what each is now, and what it lacks, as of `Rewards.digests_and_gaps`."""
        if not names:
            about: dict[str, Any] = {"kind": "", "rewards": False, "tools": []}
        elif of_program:
            factory, functions = given.get(environment), [given[name] for name in tools]
            self._make = partial(self._in_threads, factory, functions, plain_name(environment))
            self.put_back(self.take(1))
            about = description(self._hosts[0].instance, environment or ", ".join(tools))
            self.digests_and_gaps = {name: digest_and_gaps(given[name]) for name in names}
        else:
            if not hasattr(os, "fork"):
                raise InputError("environments by path need a system that forks processes; give a class from Python.")
            about = self._described()
            self._template = Worker("oblrpo.environments.worker:main", talkative=True)
            self._make = self._forked
            self.digests_and_gaps = {name: (digest, ()) for name, digest in about["digests"].items()}
        self.name: str = about["kind"] if environment else ""
        """The name of the environment's class, which its reward goes by."""
        self.reward: str = about["kind"] if about["rewards"] else ""
        """The name that its reward goes by, the same; "" where it gives none."""
        self.tools: list[dict[str, Any]] = about["tools"]
        """The JSON schemas of all tools."""
        self.warn: Callable[[str], None] = lambda note: None
        """Is told what a user should know while they are used."""
        self.about = (
            f"{', '.join(tool['function']['name'] for tool in self.tools)} ({', '.join(map(plain_name, names))})"
        )
        """The names of all tools, and of what has them."""

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self.tools)

    def take(self, count: int) -> list[Host]:
        """Return so many environments, which are to be given back with `put_back`."""
        if (lacking := count - len(self._free)) > 0:
            made = self._make(lacking)
            self._hosts, self._free = self._hosts + made, self._free + made
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def put_back(self, hosts: Sequence[Host]) -> None:
        """Take back environments that still answer, for further episodes."""
        self._free = [*hosts, *self._free]

    def end(self, host: Host) -> None:
        """End one that is of no further use, and what it has started."""
        self._hosts.remove(host)
        host.end()

    def close(self) -> None:
        """End all of them; they start again when they are needed."""
        if self._template:
            self._template.stop()  # with all processes that it has forked
        for host in self._hosts:
            host.leave()
        self._hosts = self._free = []

    def _in_threads(
        self, factory: Callable[[], Any] | None, functions: Sequence[Callable[..., Any]], name: str, count: int
    ) -> list[Host]:
        try:
            return [_Local(Instance(factory, functions, self._named["longest"])) for _ in range(count)]
        except InputError:
            raise
        except Exception as error:  # the user's code may raise anything
            what = f"{type(error).__name__}: {shown(str, error)}"
            raise InputError(f"environment '{name}' cannot be made: {what}.") from error

    def _described(self) -> dict[str, Any]:
        """The description of what is named, from a process that ends with it: making it loads transformers."""
        worker, what = Worker("oblrpo.environments.worker:main", talkative=True), "environment or tools"
        try:
            about: dict[str, Any] = worker.ask(self._named, START)
        except (TimeoutError, WorkerDied) as error:
            names = ", ".join(filter(None, [self._named["environment"], *self._named["tools"]]))
            raise InputError(f"{what} '{names}' cannot be loaded: {error}.") from None
        finally:
            worker.stop()
        if refused := about.get("refused"):
            raise InputError(refused)
        return about

    def _forked(self, count: int) -> list[Host]:
        names = ", ".join(filter(None, [self._named["environment"], *self._named["tools"]]))
        hosts: list[Host] = []
        with TemporaryDirectory(prefix="oblrpo-") as folder, socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(address := str(Path(folder, "episodes")))
                listener.listen(count)
                listener.settimeout(START)
                assert self._template is not None
                reply = self._template.ask({**self._named, "address": address, "count": count}, START)
                if refused := reply.get("refused"):
                    raise InputError(refused)
                hosts += [_Process(listener.accept()[0], names) for _ in range(count)]
            except (TimeoutError, WorkerDied, OSError) as error:
                why = f"{error}; set TMPDIR to a shorter path" if "path too long" in str(error) else str(error)
                raise InputError(f"the processes of {names} do not start: {why}.") from None
        return hosts


class _Process:
    """An environment in a process of its own."""

    environment = None

    instance = None

    def __init__(self, channel: socket.socket, names: str) -> None:
        self._channel = channel
        try:
            if isinstance(pid := exchange(channel, b"", START), str):
                raise InputError(f"environment '{names}' cannot be made: {pid}.")
        except BaseException:
            channel.close()
            raise
        self.process = psutil.Process(pid)

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        request = json.dumps([message, seconds]).encode() + b"\n"
        reply: dict[str, Any] = exchange(self._channel, request, min(seconds, LONGEST) + GRACE)
        return reply

    def leave(self) -> None:
        self._channel.close()

    def end(self) -> None:
        if self.process.is_running():  # and no other has its number now
            end_tree(self.process.pid, "")  # before the channel closes, at which it would leave what it has started
        self.leave()


class _Local:
    """An environment in this process; every call has a thread of its own."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.environment = instance, instance.environment

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        try:
            return in_thread(self.instance.answer, message, seconds).result(min(seconds, LONGEST))
        except concurrent.futures.TimeoutError:  # of Python 3.10, where it is no TimeoutError
            raise TimeoutError(f"no answer after {seconds:g} s") from None

    def leave(self) -> None:
        self.instance.close()

    end = leave  # nothing ends a thread
