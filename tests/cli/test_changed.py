"""A run goes on with the data and the rewards that it was started with, or says what has changed."""

import json
import sys

import pytest

from oblrpo.settings import read_yaml_file, settings_in
from tests.cli.conftest import SMALL, complained, metrics_of

REWARD = "def f(completions, **columns):\n    return [len(each) % 3 for each in completions]\n"


def write_rows(path, *numbers):
    rows = [{"prompt": f"{n} is", "answer": str(n), "completion": str(n)} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path):
    """A folder with all that a run may learn from."""
    write_rows(tmp_path / "data.jsonl", *range(40))
    write_rows(tmp_path / "more.jsonl", *range(40, 60))
    write_rows(tmp_path / "test.jsonl", *range(60, 80))
    write_rows(tmp_path / "shown.jsonl", *range(80, 90))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "mine_by_name.py").write_text(REWARD)
    (tmp_path / "where_it_is.py").write_text(REWARD)
    (tmp_path / "elsewhere.py").write_text("from where_it_is import f\n")
    return tmp_path


@pytest.fixture
def begun(place, small_run, monkeypatch):
    """A run of two steps that learns from all of it."""
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    lists = ["--data", place / "data.jsonl", place / "more.jsonl", "--rewards", f"{place}/reward.py:f@0.5"]
    lists += ["mine_by_name.f", f"{place}/elsewhere.py:f", "numeric"]
    code, _, err = small_run(
        *lists, steps=2, eval_data=place / "test.jsonl", sft_data=place / "shown.jsonl", warm_start_args={"batch": 8}
    )
    assert code == 0, err
    return place / "run"


NAMES = {
    "data.jsonl": "data {}/data.jsonl", "more.jsonl": "data {}/more.jsonl", "test.jsonl": "eval_data {}/test.jsonl",
    "shown.jsonl": "sft_data {}/shown.jsonl", "reward.py": "rewards {}/reward.py:f",
    "mine_by_name.py": "rewards mine_by_name.f", "where_it_is.py": "rewards {}/elsewhere.py:f",
}  # fmt: skip


def test_what_a_run_learns_from_stands_in_its_settings_by_digests(begun, place):
    known = read_yaml_file(begun / "config.yaml")["identity"]["sources"]
    assert set(known) == {name.format(place) for name in NAMES.values()}
    assert all(len(digest) == 64 for digest in known.values())


def test_a_change_is_told_by_name_and_refused_unless_it_is_accepted(begun, place, oblrpo):
    before, go_on = metrics_of(begun), ["train", "--resume", "--output", begun, "--steps", 3]
    texts = {file: (place / file).read_text() for file in NAMES}
    added = {
        file: json.dumps({"prompt": "7 + 7", "answer": "14", "completion": "14"}) + "\n"
        if file.endswith("jsonl") else "# otherwise\n"
        for file in NAMES
    }  # fmt: skip
    for file, name in NAMES.items():
        (place / file).write_text(texts[file] + added[file])
        complained(oblrpo(*go_on), f": {name.format(place)} changed since", "--accept-changed")
        (place / file).write_text(texts[file])
    assert metrics_of(begun) == before
    for file in ("data.jsonl", "reward.py"):
        (place / file).write_text(texts[file] + added[file])
    code, out, err = oblrpo(*go_on, "--accept-changed")
    assert code == 0, err
    told = f"accepted: data {place}/data.jsonl, rewards {place}/reward.py:f."
    assert told in " ".join((out + err).split())
    (place / "more.jsonl").touch()
    assert oblrpo(*go_on[:-1], 4)[0] == 0, "what was accepted is what the run has from here on"
    assert [row["step"] for row in metrics_of(begun)] == [0, 1, 2, 3, 4]


def test_numbers_that_nobody_gave_fit_the_rows_that_are_accepted(tmp_path, oblrpo):
    free = {"--prompts-per-step", "--eval-prompts"}
    flags = [word for flag, value in SMALL.items() if flag not in free for word in (flag, value)]
    data, run = tmp_path / "data.jsonl", ["--output", tmp_path / "run", "--steps"]
    write_rows(data, *range(30))
    code, _, err = oblrpo("train", *flags, "--data", data, *run, 1)
    assert code == 0, err
    before = settings_in(tmp_path / "run" / "config.yaml")["prompts_per_step"]
    write_rows(data, *range(20))
    code, out, err = oblrpo("train", "--resume", "--accept-changed", *run, 2)
    assert code == 0, err
    now = settings_in(tmp_path / "run" / "config.yaml")["prompts_per_step"]
    assert now <= 18
    assert f"prompts_per_step {now} instead of {before} (no more to train on)" in out
    assert oblrpo("train", "--resume", *run, 3)[0] == 0


def test_a_task_of_ones_own_that_has_changed_is_told(tmp_path, small_run, oblrpo):
    file = tmp_path / "mine.py"
    file.write_text("from oblrpo.tasks.path import PathTask\n\n\nclass Routes(PathTask):\n    pass\n")
    assert small_run(task=f"{file}:Routes", steps=1)[0] == 0
    file.write_text(file.read_text() + "# otherwise\n")
    go_on = ["train", "--resume", "--output", tmp_path / "run", "--steps", 2]
    complained(oblrpo(*go_on), f": task {file}:Routes changed since", "--accept-changed")
    assert oblrpo(*go_on, "--accept-changed")[0] == 0
