"""The process in which a user's reward function is loaded and runs; see `oblrpo.workers`."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oblrpo.checksums import sum_of, sum_of_texts
from oblrpo.errors import InputError
from oblrpo.regular_files import regular
from oblrpo.rewards.user import RewardFailed, call_reward, takes, waits
from oblrpo.user_code import load_named
from oblrpo.workers import serve

Reward = Callable[..., Sequence[float | None]]
_loaded: dict[str, Reward] = {}


def digest_of(path: str, reward: Reward) -> str:
    """Return the SHA-256 of a reward's files, the one that its path names and where it is defined; "" of none."""
    file, colon, _ = path.rpartition(":")
    named = file if colon else getattr(sys.modules.get(path.rpartition(".")[0]), "__file__", None)
    defined = getattr(sys.modules.get(getattr(reward, "__module__", None) or ""), "__file__", None)
    files = dict.fromkeys(Path(name).resolve() for name in (named, defined) if name)
    with suppress(OSError):
        return sum_of_texts(sum_of(regular(file)) for file in files) if files else ""
    return ""


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return {"refused": why} of a path, {"failed": what} of a call, or {"values": numbers, None, or [repr] of others}.

    A message without arguments only loads the function, and is answered with {"digest": `digest_of` it, "takes": the
    names that it can be called with, "waits": whether it is async}.
    """
    path = message["path"]
    try:
        reward = _loaded[path] = _loaded.get(path) or load_named(path)
    except InputError as error:
        return {"refused": str(error)}
    if "given" not in message:
        return {"digest": digest_of(path, reward), "takes": sorted(takes(reward)), "waits": waits(reward)}
    try:
        return {"values": call_reward(reward, message["given"])}
    except RewardFailed as what:
        return {"failed": str(what)}


def main() -> None:
    """Compute rewards until the input ends."""
    serve(answer)
