"""Data whose answers are words: the error of the default reward says what to do, and a run that does it learns."""

import json
import re

import pytest

from oblrpo.errors import InputError
from tests.door.conftest import write_rows

ASKED = [
    {"messages": [{"role": "user", "content": f"Case {number}: {word}?"}], "answer": answer}
    for number in range(40)
    for answer, word in (("a", "up"), ("e", "down"))
]


@pytest.mark.usefixtures("no_page")
def test_a_chat_data_set_learns_with_what_the_error_proposes(tmp_path, command_line):
    """A policy that is built says random letters; it is resumed, evaluated by other words, and exported."""
    data = write_rows(tmp_path / "chats.jsonl", ASKED)
    flags = ["--data", data, "--prompt-column", "messages", "--output", tmp_path / "run", "--steps", 30]
    flags += ["--prompts-per-step", 16, "--max-completion-length", 6, "--threads", 1, "--num-generations", 8]
    code, _, err = command_line("train", *flags)
    assert code == 2
    proposed = re.search("choose (--rewards) ([a-z]+) ", err).groups()
    code, _, err = command_line("train", *flags, *proposed)
    assert code == 0, err
    code, _, err = command_line("train", "--resume", "--output", tmp_path / "run", "--steps", 32)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    first, last = (sum(row["rewards/contains/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert len(rows) == 32
    assert first < 0.1 < 0.3 < last
    words, more = ["contains:a", r"regex:^\S+$@0.5"], ["--samples", 2, "--output", tmp_path / "evaluation"]
    code, out, err = command_line("evaluate", tmp_path / "run", "--json", "--rewards", *words, *more)
    assert code == 0, err
    assert json.loads(out)["results"][0]["rewards"] == words
    code, _, err = command_line("export", tmp_path / "run")
    assert code == 0, err
    assert "contains" in (tmp_path / "run" / "export" / "README.md").read_text()


def test_words_patterns_and_functions_from_python(train):
    """Rewards of all kinds are summed by their weights, and a resumed run has the rewards it began with."""

    def vowels(completions, **columns):
        return [float("a" in text[0]["content"]) for text in completions]

    names = [
        "contains:{text: [a, e], any: true, parts: true}",
        r"regex:[^\W\d_]",
        "json_valid",
        "length:tokens",
        vowels,
    ]
    given = {"data": ASKED, "prompt_column": "messages", "model": None, "reward": names, "steps": 2}
    run = train(**given, reward_weights=[1, 0.5, 1, -0.1, 2])
    for row in run.metrics[1:]:
        parts = [row[f"rewards/{name}/mean"] for name in ("contains", "regex", "json_valid", "length", "vowels")]
        assert row["reward"] == pytest.approx(
            sum(w * part for w, part in zip([1, 0.5, 1, -0.1, 2], parts, strict=True))
        )
        assert row["rewards/length/mean"] == row["completions/mean_length"]
    assert len(train(**given | {"steps": 3}, reward_weights=[1, 0.5, 1, -0.1, 2], resume=True).metrics) == 4
    with pytest.raises(InputError, match="reward"):
        train(**given | {"reward": ["contains:b", *names[1:]]}, reward_weights=[1, 0.5, 1, -0.1, 2], resume=True)
