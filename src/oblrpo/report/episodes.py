"""An episode as pages and the console show it, from a row of the log of completions."""

import json
from collections.abc import Mapping
from typing import Any

MOST_LINES = 40  # of an episode on a page; of a longer one its beginning and its end
FAILED = "{'error': "  # how the result of a call that failed begins, as in TRL


def is_episode(messages: Any) -> bool:
    """Whether the messages of a row are some: mappings, and so are the calls that they make."""
    return isinstance(messages, list) and all(
        isinstance(each, dict)
        and isinstance(calls := each.get("tool_calls") or [], list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
        for each in messages
    )


def lines_of(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return who speaks, what is said, and its kind: `own` of the policy, `read` by it, or `failed` of a call."""
    first = row.get("observation")
    lines = [("environment", str(first), "read")] if first else []
    # Calls of the last turn are not made where it was cut, or one too many.
    made_last = row.get("calls", 0) > sum(len(calls_of(message)) for message in row["messages"][:-1])
    for number, message in enumerate(row["messages"], start=1):
        content = str(message.get("content") or "")
        if message.get("role") == "tool":
            failed = content.startswith(FAILED)
            lines.append((f"{message.get('name')}{' failed' * failed}", content, "failed" if failed else "read"))
            continue
        if thought := message.get("reasoning_content"):
            lines.append(("policy thinks", str(thought), "own"))
        made = number < len(row["messages"]) or made_last
        calls = [("policy calls" if made else "policy would call", call, "own") for call in calls_of(message)]
        lines += [("policy", content, "own")] if content.strip() or not calls else []
        lines += calls
    if (more := len(lines) - MOST_LINES) > 0:
        lines[MOST_LINES // 2 : -MOST_LINES // 2] = [("", f"{more} lines left out", "read")]
    return lines


def in_a_line(row: Mapping[str, Any]) -> str:
    """Return what was said in an episode, such as `2 turns: price(item="egg") -> 3; It costs 3.`."""
    turns: list[str] = []
    for message in row["messages"]:
        content = str(message.get("content") or "")
        if message.get("role") == "tool":
            turns[-1:] = [f"{turns[-1] if turns else ''} -> {content}"]
        else:
            turns.append(" ".join(filter(None, [content, *calls_of(message)])))
    ended = f" (ended by {stop})" if (stop := row.get("stop", "answer")) != "answer" else ""
    return f"{len(turns)} turn{'s' * (len(turns) != 1)}: {'; '.join(turns)}{ended}"


def calls_of(message: Mapping[str, Any]) -> list[str]:
    """Write the calls of a message, each as `name(argument=value, ...)` with values as JSON has them."""
    return [_call(call["function"]) for call in message.get("tool_calls") or []]


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, dict):
        return f"{name}({', '.join(f'{key}={_value(value)}' for key, value in arguments.items())})"
    return f"{name}({_value(arguments)})"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
