"""The process that loads a user's environment, and is forked for every episode; see `oblrpo.workers`."""

import json
import os
import signal
import socket
from typing import Any

from oblrpo.environments.instance import Instance, description
from oblrpo.errors import InputError, shown
from oblrpo.rewards.worker import digest_of
from oblrpo.user_code import load_named
from oblrpo.workers import leave_channel, serve

_loaded: dict[str, Any] = {}


def _load(path: str, what: str, kind: str) -> Any:
    _loaded[path] = _loaded.get(path) or load_named(path, what, kind)
    return _loaded[path]


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return {"refused": why}, the description of an environment, or {} once so many forks of this process live.

    A fork makes an environment of its own, connects to `address`, and answers messages from there.
    """
    environment = message["environment"]
    try:
        factory = _load(environment, "environment", "class") if environment else None
        functions = [_load(path, "tool", "function") for path in message["tools"]]
        if "address" not in message:
            instance = Instance(factory, functions)
            named = dict(zip((environment, *message["tools"]), (factory, *functions), strict=True))
            digests = {path: digest_of(path, each) for path, each in named.items() if path}
            return description(instance, environment or ", ".join(message["tools"])) | {"digests": digests}
    except InputError as error:
        return {"refused": str(error)}
    except BaseException as error:  # of the user's code
        return {"refused": f"environment '{environment}' cannot be made: {type(error).__name__}: {shown(str, error)}."}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that end leave nothing behind
    try:
        for _ in range(message["count"]):
            if os.fork() == 0:
                _live(factory, functions, message)
    except OSError as error:
        return {"refused": f"no process can be started for an episode ({error}); lower prompts_per_step."}
    return {}


def _live(factory: Any, functions: list[Any], settings: dict[str, Any]) -> None:
    """Answer the messages of one episode after another until nobody asks any more, and end this process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # a group of its own, to be killed alone
        leave_channel()
        for stream in (1, 2):  # a thousand episodes would fill the terminal with what their tools print
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(settings["address"])
            try:
                instance = Instance(factory, functions, settings["longest"], interrupts=True)
            except BaseException as error:  # of the user's code
                channel.sendall(json.dumps(f"{type(error).__name__}: {shown(str, error)}").encode() + b"\n")
                return
            channel.sendall(json.dumps(own := os.getpid()).encode() + b"\n")
            for line in channel.makefile("rb"):
                message, seconds = json.loads(line)
                reply = instance.answer(message, seconds)
                if os.getpid() != own:  # a fork of a tool's, which has come back
                    return
                channel.sendall(json.dumps(reply).encode() + b"\n")
    finally:
        os._exit(0)


def main() -> None:
    """Describe and fork until the input ends."""
    serve(answer)
