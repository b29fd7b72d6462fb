"""Files of completions are read by problem, and what is wrong with one is named."""

import json

import pytest

from oblrpo.errors import InputError
from oblrpo.evaluation.evaluate import read_completions


@pytest.fixture
def file_of(tmp_path):
    """Write a file with so many completions of each problem."""

    def write(*counts):
        rows = [{"index": i, "sample": s, "completion": f"{i}.{s}"} for i, n in enumerate(counts) for s in range(n)]
        path = tmp_path / "completions.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
        return path

    return write


def test_completions_come_by_problem(file_of):
    assert read_completions(file_of(2, 2), 2) == [["0.1", "0.0"], ["1.1", "1.0"]]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((1, 0, 1, 0), r"has no completion for index 1, 3;"),
        ((1, *[0] * 8), r"has no completion for index 1, 2, 3, 4, 5 and 3 more;"),
        ((3, 3, 2, 3), r"more or fewer completions for index 2 than the 3 of other problems"),
        ((2, 2, 3, 1), r"more or fewer completions for index 2, 3 than the 2 of other problems"),
    ],
)
def test_problems_without_as_many_completions_are_named(file_of, counts, message):
    with pytest.raises(InputError, match=message):
        read_completions(file_of(*counts), len(counts))
