"""Every mistake on the command line gets one sentence and exit code 2: `errors.txt` is the table of both.

In it `$` begins a command, `@` lines before it are its `mine.yaml`, `#` lines are headings, and what follows is the
sentence, in which `...` stands for anything.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL
from tests.cli.test_families import folder_of

TABLE = Path(__file__).with_name("errors.txt")


def _rows():
    """Command, `mine.yaml` and sentence of every row of the table."""
    blocks = re.split(r"^\$ ", re.sub("^#.*\n", "", TABLE.read_text(encoding="utf-8"), flags=re.M), flags=re.M)
    recipe = blocks[0]
    for block in blocks[1:]:
        lines = block.rstrip("\n").split("\n")
        said = [line for line in lines[1:] if line and not line.startswith("@")]
        yield lines[0], "\n".join(line[2:] for line in recipe.split("\n") if line.startswith("@")), said
        recipe = block


ROWS = list(_rows())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with files and folders by the names that the table has."""
    place = tmp_path_factory.mktemp("errors")
    for name in ("rows.jsonl", "more.jsonl"):
        (place / name).write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    (place / "long.jsonl").write_text(f'{{"prompt": "{"x" * 5000}", "answer": "2"}}\n' * 99)
    for name in ("demo", "empty", "run"):
        (place / name).mkdir()
    (place / "run" / "config.yaml").write_text("steps: 3\n")
    (place / "notes.txt").write_text("no folder")
    folder_of("qwen3-tied", place / "model")
    return place


@pytest.mark.page
@pytest.mark.parametrize(("command", "recipe", "said"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_every_mistake_is_one_sentence(oblrpo, place, monkeypatch, command, recipe, said):
    monkeypatch.chdir(place)
    (place / "mine.yaml").write_text(recipe + "\n")
    before = sorted(place.rglob("*"))
    words = shlex.split(command)
    sizes = {"--model-args"} if "--model" in words else set()
    small = [word for flag in SMALL.keys() - sizes for word in (flag, SMALL[flag])] if words[:1] == ["train"] else []
    code, out, err = oblrpo(*words[:1], *small, *words[1:])
    assert (code, out) == (2, "")
    expected = ".*".join(map(re.escape, " ".join(["oblrpo:", *" ".join(said).split()]).split("...")))
    assert re.fullmatch(expected, " ".join(err.split())), err
    assert sorted(place.rglob("*")) == before


def test_no_mistake_is_there_twice():
    commands = [row[:2] for row in ROWS]
    assert len(set(commands)) == len(commands)
