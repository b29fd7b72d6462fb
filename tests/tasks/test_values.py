"""What rows of a program or a table may hold: numbers, arrays and dates of libraries, and answers of any shape."""

import datetime
import json
from decimal import Decimal

import numpy
import pandas
import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.objects import split_objects
from oblrpo.rewards import Rewards
from oblrpo.settings import TaskConfig
from oblrpo.tasks import DataTask, Problem
from oblrpo.tasks.rows import plain
from oblrpo.trainer.task import data_problems, name_of

HUGE = 10**5000


def problems(rows, **settings):
    words, objects = split_objects(data=rows)
    return data_problems(TaskConfig(data=words["data"], **settings), objects)


def word(**row):
    return split_objects(data=[row])[0]["data"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (numpy.float64(1.5), "1.5"),
        (numpy.float32(0.5), "0.5"),
        (numpy.int64(-7), "-7"),
        (numpy.array(3), "3"),
        (numpy.str_("x"), "x"),
        (torch.tensor(4), "4"),
        (Decimal("1.50"), "1.50"),
        (10**3999, str(10**3999)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_libraries_are_numbers(value, text):
    (problem,) = problems([{"prompt": "p", "answer": value}], rewards=("exact",))
    assert problem.answer == text
    task = DataTask("mine", [problem], [], default_rewards=("exact",))
    assert Rewards(task)([problem], [text])[0] == [[1.0]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (HUGE, "a JSON number; it must be text or a finite number of at most 4,000 digits"),
        (Decimal("1e9999999"), "a Decimal; it must be"),
        (Decimal("sNaN"), "a Decimal; it must be"),
        (numpy.float64("nan"), "a JSON number; it must be"),
        (numpy.arange(3), "a JSON array; it must be"),
        (numpy.bool_(True), "a JSON boolean; it must be"),
        (datetime.datetime(2026, 1, 2), "a datetime; it must be"),
        (b"4", "a bytes; it must be"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_answer_to_be_compared_is_text_or_a_number(value, words):
    with pytest.raises(InputError, match=f"^data row 1: column 'answer' holds {words}"):
        problems([{"prompt": "p", "answer": "4"}, {"prompt": "q", "answer": value}], rewards=("exact",))
    assert plain(value) is None


@pytest.mark.parametrize(
    "value",
    [[1, 2], {"a": [1]}, True, None, HUGE, numpy.arange(2), datetime.date(2026, 1, 2)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("column", ["answer", "gold"])
def test_own_rewards_take_any_answer_in_whatever_row(value, column):
    rows = [{"prompt": "p"}, {"prompt": "q", column: value}, {"prompt": "r", column: "4"}]
    found = problems(rows, answer_column=column, rewards=("python:f",))
    seen = []

    def look(completions, answer, **columns):
        seen.extend(answer)
        return [0.0] * len(completions)

    task = DataTask("mine", found, [], default_rewards=("python:f",))
    Rewards(task, functions={"python:f": look})(found, ["x"] * 3)
    assert seen == [None, value.tolist() if hasattr(value, "tolist") else value, "4"]
    assert found[2].answer == "4"
    assert isinstance(found[1].answer, str)  # for the log
    for row in rows[:2]:
        with pytest.raises(InputError, match=f"^data row 0.*'{column}'"):
            problems([row], answer_column=column, rewards=("python:f", "exact"))


def test_a_reward_by_path_gets_numbers_and_lists(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(completions, n, v, **columns):\n    return [a + sum(b) for a, b in zip(n, v)]\n"
    )
    row = {"prompt": "p", "n": numpy.int64(2), "v": numpy.arange(3), "photo": b"x", "day": datetime.date(2026, 1, 2)}
    name = f"{tmp_path / 'r.py'}:f"
    found = problems([row], rewards=(name,))
    rewards = Rewards(DataTask("mine", found, []), (name,))
    assert rewards(found, ["x", "y"])[0] == [[5.0, 5.0]]
    rewards.close()


def test_a_table_of_pandas_and_its_rows(tmp_path):
    table = pandas.DataFrame(
        {"prompt": [numpy.array([{"role": "user", "content": "2+2"}], dtype=object)], "answer": [4]}
    )
    table.to_parquet(tmp_path / "rows.parquet")
    again = pandas.read_parquet(tmp_path / "rows.parquet")
    for rows in (table, again, again.to_dict("records"), [row for _, row in again.iterrows()]):
        (problem,) = problems(rows)
        assert problem.prompt == [{"role": "user", "content": "2+2"}]
        assert problem.answer == "4"


def test_every_value_counts_in_what_stands_for_rows():
    """An array's repr leaves out its middle, and Python writes no number of 5,000 digits."""
    numbers = numpy.arange(5000)
    other = numbers.copy()
    other[2000] = 0
    assert word(x=numbers) != word(x=other)
    assert word(x=numbers) == word(x=numbers.tolist())
    assert word(x=HUGE) != word(x=HUGE + 1)
    assert word(x=numpy.float32(0.5)) == word(x=0.5)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {
            "role": "user",
            "content": 'What is 40 + 2? Let\'s think step by step and output the final answer after "####".',
        }
    ],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0, "answer": "40 + 2 = 42\n#### 42", "question": "What is 40 + 2?"},
}
"""A row as verl's script for GSM8K writes it (examples/data_preprocess/gsm8k.py)."""


def test_verls_parquet_as_it_is(tmp_path):
    file = tmp_path / "train.parquet"
    pandas.DataFrame([VERL] * 2).to_parquet(file)
    for data in ((str(file),), pandas.read_parquet(file)):
        words, objects = split_objects(data=data)
        config = TaskConfig(data=words["data"], answer_column="reward_model.ground_truth")
        problem, _ = found = data_problems(config, objects)
        assert (problem.prompt, problem.answer) == (VERL["prompt"], "42")
        assert problem.columns["reward_model"] == VERL["reward_model"]
        assert Rewards(DataTask(name_of(config.data), found, []))([problem], ["#### 42", "41"])[0] == [[1.0, 0.0]]
    with pytest.raises(InputError, match=r"no column 'answer'; its columns are: .*'reward_model.ground_truth'"):
        problems([VERL])
    with pytest.raises(
        InputError, match=r"no column 'reward_model.truth'; .* Did you mean 'reward_model.ground_truth'\?"
    ):
        problems([VERL], answer_column="reward_model.truth")
    (problem,) = problems([VERL], prompt_column="extra_info.question", answer_column="extra_info.answer")
    assert problem.prompt == "What is 40 + 2?"
    (problem,) = problems([{"prompt": "p", "a.b": "1", "a": {"b": "2"}}], answer_column="a.b")
    assert problem.answer == "1"


def test_where_reads_keys_and_arrays():
    rows = [VERL | {"levels": numpy.arange(2)}, VERL | {"levels": numpy.arange(3), "extra_info": {"split": "test"}}]
    settings = {"answer_column": "reward_model.ground_truth"}
    assert len(problems(rows, where={"extra_info.split": "train"}, **settings)) == 1
    assert len(problems(rows, where={"levels": [[0, 1, 2]]}, **settings)) == 1


def test_a_hint_can_be_followed():
    """More of a file whose prompts are equal cannot be held out, nor of one that has a test set of its own."""
    rows = [Problem("p", "1")] * 40
    for task, ask in (
        (DataTask("mine", rows), lambda task: task.heldout(8)),
        (DataTask("mine", rows, heldout_fraction=0.99), lambda task: task.train_batch(1, 8)),
    ):
        with pytest.raises(
            InputError, match=r"few different prompts \(1\).*: give rows with other prompts as eval_data"
        ):
            ask(task)
    task = DataTask("mine", rows, [Problem("q", "1")] * 8)
    assert len(task.heldout(8)) == len(task.train_batch(1, 8)) == 8
    with pytest.raises(InputError, match=r"set eval_prompts lower or add rows\.$"):
        task.heldout(9)


def test_messages_of_odd_values_are_refused_with_what_was_found():
    for message, words in (
        ({"from": "human", "value": "x"}, "message 0 has no role, but 'from', 'value'"),
        ({"role": "robot", "content": "x"}, "message 0 has the role 'robot'"),
        ({"role": "user", "content": None}, r"message 0 \(user\) has no content"),
        ({"role": "user", "content": None, "id": 3}, r"message 0 \(user\) has no content"),
        ({"role": "user", "content": 3}, r"message 0 \(user\) has a JSON number as its content"),
        ({"role": "user", "content": [{"type": "image"}]}, r"has a part {\"type\": \"image\"}, which is not text"),
    ):
        with pytest.raises(InputError, match=words):
            problems([{"prompt": [message], "answer": "1"}])
    rows = [{"prompt": [{"role": "user", "content": "x"}], "answer": "1", "tools": json.dumps({"name": "add"})}]
    with pytest.raises(InputError, match="column 'tools', which is a JSON object, not a JSON array"):
        problems(rows)
