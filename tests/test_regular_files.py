"""What never ends is refused: pipes, sockets and devices, and rows without an end."""

import itertools
import os
import socket

import pytest

from oblrpo import objects
from oblrpo.checksums import SUMS, damage
from oblrpo.errors import InputError
from oblrpo.policy import load_policy, make_policy
from oblrpo.settings import PolicyConfig
from oblrpo.tasks.sources import read_source

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
SMALL = {"model_args": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}, "device": "cpu"}
NO_FILE = "it is a pipe, a socket or a device, not a regular file"


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
def test_data_come_from_regular_files(tmp_path, ending):
    pipe, link = tmp_path / f"pipe.{ending}", tmp_path / f"link.{ending}"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    for path in (pipe, link):
        with pytest.raises(InputError, match=f"Cannot read the data file {path}: .*{NO_FILE}.*; check the path"):
            list(read_source([str(path)], "train"))
    with pytest.raises(InputError, match=r"Cannot read the data file .*Is a directory"):
        list(read_source([str(tmp_path)], "train"))


def test_a_socket_is_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("rows.jsonl")
        with pytest.raises(InputError, match=NO_FILE):
            list(read_source(["rows.jsonl"], "train"))


def test_a_pipe_in_the_place_of_checksums_is_damage(tmp_path):
    os.mkfifo(tmp_path / SUMS)
    assert damage(tmp_path) == f"{SUMS} is missing or cannot be read"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", SUMS, "generation_config.json"])
def test_a_model_folder_holds_regular_files(tmp_path, name):
    make_policy(PolicyConfig(**SMALL)).save(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"cannot load the model .*: {name} is a pipe, a socket or a device"):
        load_policy(str(tmp_path), PolicyConfig(device="cpu"))


def test_a_gguf_file_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(InputError, match=r"model.gguf is a pipe"):
        load_policy(str(tmp_path / "model.gguf"), PolicyConfig(device="cpu"))


def test_rows_without_an_end_are_refused_and_long_lists_are_not(monkeypatch):
    monkeypatch.setattr(objects, "MOST_ROWS", 5)
    endless = ({"prompt": str(n)} for n in itertools.count())
    with pytest.raises(InputError, match=r"^data has more than 5 rows.*list\(itertools.islice\(data, 10_000\)\)"):
        objects.rows_of(endless, "data")
    assert len(objects.rows_of(({"prompt": str(n)} for n in range(5)), "data")) == 5
    assert len(objects.rows_of([{"prompt": "p"}] * 9, "data")) == 9
