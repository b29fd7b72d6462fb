"""The process in which a user's reward function runs; see `oblrpo.workers`."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError
from oblrpo.rewards.load import Reward, load_reward
from oblrpo.rewards.reward_set import plain_reward
from oblrpo.workers import serve

_loaded: dict[str, Reward] = {}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return {"refused": why} of a path, {"failed": what} of a call, or {"values": numbers, None, or [repr] of others}.

    A message without completions only loads the function.
    """
    path = message["path"]
    try:
        reward = _loaded[path] = _loaded.get(path) or load_reward(path)
    except InputError as error:
        return {"refused": str(error)}
    if "completions" not in message:
        return {}
    values: Any
    try:
        values = reward(prompts=message["prompts"], completions=message["completions"], **message["columns"])
        if not isinstance(values, Iterable):
            return {"failed": f"returned a {type(values).__name__}, not a list of numbers"}
        return {"values": [plain_reward(value) for value in values]}
    except Exception as error:  # the user's code may raise anything, a generator only now
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name} line {frame.lineno}"
        return {"failed": f"raised {type(error).__name__}: {error} ({where})"}


def main() -> None:
    """Compute rewards until the input ends."""
    serve(answer)
