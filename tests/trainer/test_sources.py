"""What a run learns from has a digest that tells it from everything else."""

import json

import pytest

from oblrpo.objects import Objects, split_objects
from oblrpo.rewards import Rewards
from oblrpo.settings import TaskConfig, TrainConfig, WarmStartConfig
from oblrpo.tasks import BENCHMARKS, sources
from oblrpo.trainer.demonstrations import read_rows
from oblrpo.trainer.task import sources_of, task_of

ROWS = [{"prompt": f"{n} is", "answer": str(n), "completion": str(n), "question": f"{n} is"} for n in range(40)]


@pytest.fixture
def digests(monkeypatch):
    """The digests of a run whose data comes from a hub that holds these rows, by data set and split."""

    def take(held, task="path", sft_data=(), **names):
        def read_hub(path, configuration, split):
            rows = held[path, split]
            return [(f"{path} row {index}", dict(row)) for index, row in enumerate(rows)]

        monkeypatch.setattr(sources, "read_hub", read_hub)
        monkeypatch.setattr("oblrpo.tasks.benchmarks.read_hub", read_hub)
        config = TrainConfig(task=TaskConfig(task=task, **names), warm_start=WarmStartConfig(sft_data=sft_data))
        made, shown = task_of(config), read_rows(config, Objects())
        return sources_of(config, made, shown, Rewards(made, ["length"]))

    return take


def test_data_of_the_hub_is_known_by_its_rows(digests):
    names = {"data": ("a/train",), "eval_data": ("a/test",), "sft_data": ("a/shown",)}
    held = {("a/train", "train"): ROWS[:20], ("a/test", "test"): ROWS[20:], ("a/shown", "train"): ROWS[:5]}
    before = digests(held, **names)
    assert list(before) == ["data a/train", "eval_data a/test", "sft_data a/shown"]
    assert digests(held, **names) == before
    for place, name in zip(held, before, strict=True):
        changed = digests(held | {place: held[place][:-1]}, **names)
        assert [each for each in before if before[each] != changed[each]] == [name]


def test_a_benchmark_of_the_hub_is_known_by_its_rows(digests):
    rows = [row | {"answer": f"#### {row['answer']}"} for row in ROWS]
    held = {("openai/gsm8k", "train"): rows[:20], ("openai/gsm8k", "test"): rows[20:]}
    before = digests(held, task="gsm8k")
    assert list(before) == ["data gsm8k", "eval_data gsm8k"]
    other = digests(held | {("openai/gsm8k", "test"): rows[21:]}, task="gsm8k")
    assert other["data gsm8k"] == before["data gsm8k"]
    assert other["eval_data gsm8k"] != before["eval_data gsm8k"]


def test_rows_of_a_program_and_generated_problems_have_none():
    config = TrainConfig()
    assert not sources_of(config, task_of(config), [], Rewards(task_of(config), ["length"]))


def test_a_task_on_data_says_how_many_rows_of_which_files_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train.jsonl", ROWS[:30]), ("test.jsonl", ROWS[30:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def about(objects=None, **names):
        return task_of(TrainConfig(task=TaskConfig(**names)), objects).about

    assert about(data=("train.jsonl",)) == "30 rows of train.jsonl."
    both = "30 rows of train.jsonl; held out: 10 rows of test.jsonl."
    assert about(data=("train.jsonl",), eval_data=("test.jsonl",)) == both
    assert about(data=("train.jsonl", "test.jsonl")) == "40 rows of train.jsonl, test.jsonl."
    words, objects = split_objects(data=ROWS, eval_data=ROWS[:5])
    assert about(objects, **words) == "40 rows from Python; held out: 5 rows from Python."
    asked = [{"question": row["question"], "answer": f"#### {row['answer']}"} for row in ROWS]
    monkeypatch.setattr("oblrpo.tasks.benchmarks.read_hub", lambda *_: [("here", row) for row in asked])
    of_both = "40 rows of gsm8k; held out: 40 rows of gsm8k."
    assert about(task="gsm8k") == f"{BENCHMARKS['gsm8k'].about} {of_both}"


def test_a_file_is_read_once(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{n} is", "answer": "{n}", "completion": "{n}"}}\n' for n in range(30)))
    read = []
    monkeypatch.setattr("oblrpo.trainer.task.sum_of", lambda path: read.append(path) or "digest")
    config = TrainConfig(task=TaskConfig(data=(str(file),)), warm_start=WarmStartConfig(sft_data=(str(file),)))
    task = task_of(config)
    found = sources_of(config, task, read_rows(config, Objects()), Rewards(task, ["length"]))
    assert found == {f"data {file}": "digest", f"sft_data {file}": "digest"}
    assert read == [file]
