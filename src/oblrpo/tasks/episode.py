"""A completion of several turns: what was said, and how it ended."""

from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]
STOPS = {
    "answer": "a turn without a call",
    "turns": "max_turns is reached, and the last calls are not made",
    "length": "max_completion_length is reached, or the results do not fit",
    "timeout": "its tools have taken longer than episode_seconds, and the last results are not read",
    "error": "the environment is gone",
}
"""Why episodes end."""


class Episode(list[Message]):
    """A completion as messages, as in TRL: the assistant's, with their `tool_calls`, and those of tools."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        super().__init__(messages)
        self.text = ""
        """All of it as text, without special tokens."""
        self.stop = ""
        """Why it ended, one of `STOPS`."""
        self.error = ""
        """What became of its environment, where it stopped with `error`."""
        self.turns = 0
        """The policy's turns."""
        self.calls = 0
        self.failures = 0
        """Calls that failed; the policy has read the error, unless the episode ended with it."""
        self.reward: Any = None
        """What `get_reward` returned: a number, None, or [what else it was]; None of an environment without it."""
        self.observation = ""
        """What `reset` said, which stands behind the prompt."""
        self.environment: Any = None
        """The environment, where it lives in this process."""

    @property
    def answer(self) -> str:
        """The content of the last message, if it is the policy's."""
        last = self[-1] if self else {}
        return str(last.get("content") or "") if last.get("role") == "assistant" else ""

    @property
    def whole(self) -> bool:
        """Whether its environment has lived to its end."""
        return self.stop != "error"


def logged(said: str | Episode) -> dict[str, Any]:
    """What the log of completions has of one; of an episode also how it ended, its turns, and all of its messages."""
    if isinstance(said, str):
        return {"completion": said}
    ended: dict[str, Any] = {"stop": said.stop} | ({"error": said.error} if said.error else {})
    ended |= {"turns": said.turns, "calls": said.calls, "failures": said.failures}
    return {"completion": said.text, "observation": said.observation} | ended | {"messages": list(said)}
