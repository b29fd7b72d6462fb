"""Loaders under random input: a value or an `InputError`, nothing else.

`OBLRPO_FUZZ` says how many inputs a loader gets; `make attack` gives each 10,000.
"""

import json
import os
import random
from contextlib import suppress

import pytest

from oblrpo.config import TrainConfig
from oblrpo.errors import InputError
from oblrpo.runs import read_rows
from oblrpo.settings import flatten, with_settings
from oblrpo.tasks.data import problems_of
from oblrpo.tasks.sources import read_source
from oblrpo.yaml_files import read_yaml

COUNT = int(os.environ.get("OBLRPO_FUZZ", "150"))
PIECES = [
    "a",
    "prompt",
    "answer",
    ": ",
    "\n",
    "- ",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    ",",
    "&a ",
    "*a",
    "!!bool ",
    "!!int ",
    "!!float ",
    "!!timestamp ",
    "!!binary ",
    "!!set ",
    "!!omap ",
    "!!null ",
    "<<: ",
    "? ",
    "|",
    ">",
    "%YAML 1.2\n",
    "---",
    "...",
    "#",
    "1e999",
    "9" * 400,
    "0x",
    "0o9",
    "1:60",
    "2024-13-99",
    ".nan",
    "-.inf",
    "true",
    "null",
    "\\ud800",
    "\\u0000",
    "\\",
    "\t",
    "\r",
    "\0",
    "\u202e",
    "\ufeff",
    "\u2028",
    "\x85",
    "\U0001f600",
    "\udcff",
    "seed",
    "steps",
    "rewards",
    "where",
    "learning_rate",
    '{"prompt": "p", "answer": "1"}\n',
    '{"prompt": [{"role": "user", "content": "x"}], "answer": 2}\n',
    '"role"',
    '"content"',
]


def texts(seed):
    rng = random.Random(seed)
    for _ in range(COUNT):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 25)))
        yield text * rng.choice([1, 1, 1, 2, 50])


def accepted(load):
    """Whether it was loaded; it may refuse, and do nothing else."""
    with suppress(InputError):
        load()
        return True
    return False


def test_yaml_and_settings():
    found = [accepted(lambda text=text: read_yaml(text, "f")) for text in texts(1)]
    assert any(found)
    assert not all(found)
    for text in texts(5):
        accepted(lambda text=text: with_settings(TrainConfig(), read_yaml(text, "f"), "f"))
    settings = random.Random(2)
    values = [None, True, -1, 10**400, float("nan"), "", "\ud800", [], [1], {}, {"a": 1}, object(), b"x", ("a",), "off"]
    names = list(flatten(TrainConfig()))
    for _ in range(COUNT):
        given = {settings.choice(names): settings.choice(values) for _ in range(3)}
        accepted(lambda given=given: with_settings(TrainConfig(), given, "f"))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_rows(tmp_path, suffix):
    for text in texts(suffix):
        file = tmp_path / f"rows.{suffix}"
        file.write_bytes(text.encode("utf-8", "surrogateescape" if "\udcff" in text else "strict"))
        accepted(lambda file=file: problems_of(read_source([str(file)], "train"), "prompt", "answer", "{prompt}"))


def test_rows_of_values():
    rng = random.Random(3)
    values = [
        None,
        True,
        10**400,
        -0.0,
        "x",
        "\ud800",
        "",
        [],
        {},
        [{}],
        [{"role": "user"}],
        [{"role": [], "content": "x"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "ok"}],
        float("inf"),
    ]
    for _ in range(COUNT):
        row = {rng.choice(["prompt", "answer", "prompts", "x"]): rng.choice(values) for _ in range(3)}
        text = json.dumps(row)
        accepted(lambda text=text: problems_of([("f", json.loads(text))], "prompt", "answer", "{prompt}", True))


def test_metrics(tmp_path):
    for text in texts(4):
        (tmp_path / "metrics.jsonl").write_bytes(text.encode("utf-8", "replace"))
        accepted(lambda: read_rows(tmp_path / "metrics.jsonl"))
