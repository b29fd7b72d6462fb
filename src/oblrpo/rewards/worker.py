"""The process in which a user's reward function runs; see `oblrpo.workers`."""

from __future__ import annotations

from typing import Any

from oblrpo.errors import InputError
from oblrpo.rewards.load import Reward, files_of, load_reward
from oblrpo.rewards.user import RewardFailed, call_reward
from oblrpo.workers import serve

_loaded: dict[str, Reward] = {}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return {"refused": why} of a path, {"failed": what} of a call, or {"values": numbers, None, or [repr] of others}.

    A message without completions only loads the function, and is answered with {"files": those it is written in}.
    """
    path = message["path"]
    try:
        reward = _loaded[path] = _loaded.get(path) or load_reward(path)
    except InputError as error:
        return {"refused": str(error)}
    if "completions" not in message:
        return {"files": files_of(path, reward)}
    try:
        return {"values": call_reward(reward, message["prompts"], message["completions"], message["columns"])}
    except RewardFailed as what:
        return {"failed": str(what)}


def main() -> None:
    """Compute rewards until the input ends."""
    serve(answer)
