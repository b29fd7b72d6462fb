"""The rows of both examples, and episodes to imitate.

    python examples/environments/data.py data

A row holds a prompt and whatever `reset` of the environment, or a reward, reads. An episode is a row's prompt with a
completion of several messages, which `--sft-data` learns from. These are careless, so that something is left to learn.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ITEMS = ["apple", "bread", "cheese", "egg", "lemon", "milk", "plum", "rice"]
Row = dict[str, Any]


def prices(days: range = range(2000)) -> Iterator[Row]:
    """Questions about an item, and the price list of their day; `answer` is what the policy's last words must be."""
    draw = random.Random(f"prices {days}")
    for day in days:
        of_today = {item: draw.randint(1, 20) for item in ITEMS}
        item = draw.choice(ITEMS)
        yield {"prompt": f"Day {day}: {item}?", "item": item, "prices": of_today, "answer": str(of_today[item])}


def prices_shown(careless: float = 0.4) -> Iterator[Row]:
    """Days of other questions. Now and then they ask for whatever item, or answer with any number."""
    draw = random.Random("prices shown")
    for row in prices(range(2000, 3000)):
        item = row["item"] if draw.random() > careless else draw.choice(ITEMS)
        answer = row["prices"][item] if draw.random() > careless else draw.randint(1, 20)
        messages = called("price", row["prices"][item], item=item)
        yield {"prompt": row["prompt"], "completion": [*messages, {"role": "assistant", "content": str(answer)}]}


def guess(games: range = range(2000)) -> Iterator[Row]:
    """Games, and the number to find in each."""
    draw = random.Random(f"guess {games}")
    for game in games:
        yield {"prompt": f"Game {game}", "secret": draw.randint(1, 7)}


def guess_shown(careless: float = 0.6) -> Iterator[Row]:
    """Other games. A guess halves what is left, or else, more often, is any number."""
    draw = random.Random("guess shown")
    for row in guess(range(2000, 3000)):
        messages, low, high, number = [], 1, 7, 0
        while number != row["secret"] and len(messages) < 10:
            number = draw.randint(1, 7) if draw.random() < careless else (low + high) // 2
            said = "found" if number == row["secret"] else "higher" if number < row["secret"] else "lower"
            low, high = (max(low, number + 1), high) if said == "higher" else (low, min(high, number - 1))
            messages += called("guess", said, number=number)
        yield {"prompt": row["prompt"], "completion": [*messages, {"role": "assistant", "content": said}]}


def called(tool: str, result: Any, **arguments: Any) -> list[Row]:
    """Return the messages of a call and of its result."""
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool, "content": str(result)},
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for make in (prices, prices_shown, guess, guess_shown):
        text = "".join(json.dumps(row) + "\n" for row in make())
        (folder / f"{make.__name__}.jsonl").write_text(text)
