"""What W&B, TensorBoard and trackio keep on the disk, packed files, and pipes."""

import gzip
import json
import math
import os
import random
import sqlite3
import struct
import subprocess
import sys
import threading
import types
import zlib
from pathlib import Path

import numpy as np
import pytest

from oblrpo.diagnosis import diagnose
from oblrpo.errors import InputError
from oblrpo.runs import logs
from oblrpo.runs.logs import read_log

STEPS = range(1, 401)
LINES = "".join(json.dumps({"step": n, "reward": n / 10, "kl": 0.25}) + "\n" for n in range(1, 31))


def reward_of(log):
    return [(row["step"], row["reward"]) for row in log.rows]


def blocks(records):
    """A file of W&B's: its head, and records in the log format of LevelDB."""
    file = bytearray(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))
    for record in records:
        begun = False
        while not begun or record:
            left = 32768 - len(file) % 32768
            if left < 7:
                file += bytes(left)
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = (3 if record else 4) if begun else (2 if record else 1)
            file += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            begun = True
    return bytes(file)


def of_trl(n):
    """What TRL sends W&B at a step, in any order; every tenth is longer than a block."""
    items = {"train/reward": n / 10, "train/kl": 0.25, "train/global_step": n, "_step": n + 7, "_timestamp": 1.5e9 + n}
    items["train/grad_norm"] = math.nan if n == 9 else 0.5
    items["completions/note"] = "x" * (70_000 if n % 10 == 0 else 300)
    return dict(random.Random(n).sample(sorted(items.items()), len(items)))


@pytest.fixture
def of_wandb(monkeypatch):
    """W&B's library, as far as it is read: records in JSON instead of protobuf."""

    def from_string(data):
        items = [types.SimpleNamespace(key="", nested_key=key.split("/"), value_json=json.dumps(value))
                 for key, value in json.loads(data).items()]  # fmt: skip
        return types.SimpleNamespace(history=types.SimpleNamespace(item=items))

    module = types.ModuleType("wandb.proto.wandb_internal_pb2")
    module.Record = types.SimpleNamespace(FromString=from_string)
    for name in ("wandb", "wandb.proto"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(logs, "find_spec", lambda name: name == "wandb" or None)
    return lambda steps: blocks(json.dumps(of_trl(n)).encode() for n in steps)


def test_wandb(tmp_path, of_wandb):
    """A file, the folder of a run, the folder `wandb`, and what holds that; of several runs the newest."""
    older, newest = (tmp_path / "wandb" / f"offline-run-2026{day}_114943-ab" for day in ("1128", "1129"))
    for run, first in ((newest, 1), (older, 200)):
        (run / "files").mkdir(parents=True)
        (run / "run-ab.wandb").write_bytes(of_wandb(STEPS[first - 1 :]))
    (tmp_path / "wandb" / "latest-run").symlink_to(older)
    for path in (newest / "run-ab.wandb", newest, tmp_path / "wandb", tmp_path):
        log = read_log(path)
        assert reward_of(log) == [(n, n / 10) for n in STEPS], path
        assert log.rows[8]["grad_norm"] is None
        assert log.source == "what W&B keeps" + f" in {newest.name}" * path.is_dir()


@pytest.mark.parametrize("left", range(9))
def test_a_block_of_wandb_ends_anywhere(tmp_path, of_wandb, left):
    """Less than 7 bytes at a block's end are left free; 7 hold a part of nothing."""
    first = json.dumps({"note": "x" * (32768 - 7 - 7 - left - len('{"note": ""}'))}).encode()
    file = tmp_path / "run-ab.wandb"
    file.write_bytes(blocks([first, *(json.dumps(of_trl(n)).encode() for n in STEPS[:3])]))
    assert reward_of(read_log(file)) == [(n, n / 10) for n in (1, 2, 3)]
    assert read_log(file).source == "what W&B keeps"


@pytest.mark.parametrize("damage", ["cut", "changed", "zeros"])
def test_a_damaged_file_of_wandb_is_read_so_far_and_that_is_said(tmp_path, of_wandb, damage):
    file, whole = tmp_path / "run-ab.wandb", of_wandb(STEPS)
    place = len(whole) // 2
    changed = {"cut": b"", "changed": b"\xa7" + whole[place + 1 :], "zeros": bytes(99) + whole[place + 99 :]}
    file.write_bytes(whole[:place] + changed[damage])
    log = read_log(file)
    assert reward_of(log) == [(n, n / 10) for n in range(1, len(log.rows) + 1)]
    assert 100 < len(log.rows) < 300
    assert "(run-ab.wandb: ValueError, damaged or cut off before byte" in log.source
    file.write_bytes(whole[:40])
    with pytest.raises(InputError, match=r"no known metric. Found: what W&B keeps \(run-ab.wandb: .* cut off"):
        read_log(file)


def test_wandb_by_its_own_library(tmp_path):
    pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    records = []
    for n in STEPS:
        record = pb2.Record()
        for key, value in of_trl(n).items():
            record.history.item.add(nested_key=[key], value_json=json.dumps(value))
        records += [record.SerializeToString(), pb2.Record(summary=pb2.SummaryRecord()).SerializeToString()]
    (tmp_path / "run-ab.wandb").write_bytes(blocks(records))
    assert reward_of(read_log(tmp_path)) == [(n, n / 10) for n in STEPS]


@pytest.mark.parametrize(("library", "name", "head"), [
    ("wandb", "run-ab.wandb", b":W&B\xe1\xbe\0"), ("tensorboard", "events.out.tfevents.1.vm", b"\x18\0\0brain.Event:2"),
])  # fmt: skip
def test_without_its_library_a_sentence_says_how_to_install_it(tmp_path, monkeypatch, library, name, head):
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    (tmp_path / name).write_bytes(head)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(
            InputError, match=rf"to read it, install its library: .* -m pip install 'oblrpo\[{library}\]'"
        ):
            read_log(path)


def test_tensorboard(tmp_path):
    """All files of the newest run, as a run that was resumed has them; scalars, and nothing else."""
    writer_of = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    run, older = tmp_path / "runs" / "Nov28_12-20-50_vm", tmp_path / "runs" / "Nov27_12-20-50_vm"
    for folder, first, last, suffix in ((older, 1, 9, ".a"), (run, 1, 200, ".a"), (run, 201, 400, ".b")):
        with writer_of(str(folder), filename_suffix=suffix) as writer:
            writer.add_text("args", "reward: 3")
            for n in range(first, last + 1):
                writer.add_scalar("train/loss", math.nan if n == 7 else 0.5, n)
                writer.add_scalar("train/reward", n / 8, n)
                writer.add_scalar("train/kl", math.nan if n == 7 else 0.25, n)
                writer.add_histogram("train/entropy", np.array([1.0, 2.0]), n)
    for file in older.iterdir():
        file.rename(file.with_name("events.out.tfevents.1000000000.vm"))
    for path in (run, tmp_path / "runs", tmp_path):
        log = read_log(path)
        assert reward_of(log) == [(n, n / 8) for n in STEPS]
        assert [row["kl"] for row in log.rows][5:8] == [0.25, None, 0.25]
        assert "entropy" not in log.rows[0]
        assert [log.rows[n].get("skipped") for n in (5, 6)] == [0, 1]
        assert log.source == f"what TensorBoard keeps in {run.name}"
    last = max(run.iterdir())
    last.write_bytes(last.read_bytes()[:-9])
    assert len(read_log(run).rows) >= 399
    assert "cut off before byte" in read_log(last).source


def test_trackio(tmp_path):
    file = tmp_path / "project.db"
    with sqlite3.connect(file) as base:
        base.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, timestamp TEXT, "
            "run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL)"
        )
        for run in ("b", "a"):
            for n in STEPS if run == "a" else range(3):
                row = {"train/reward": n / 10, "train/grad_norm": "Infinity" if n == 7 else 1.0, "train/global_step": n}
                base.execute(
                    "INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", (run, n + 5, json.dumps(row))
                )
    base.close()
    for path in (file, tmp_path):
        log = read_log(path)
        assert reward_of(log) == [(n, n / 10) for n in STEPS]
        assert log.rows[6]["overflow"] == "grad_norm"
        assert "(a, the newest of 2 runs)" in log.source
    with sqlite3.connect(tmp_path / "other.db") as base:
        base.execute("CREATE TABLE metrics (key TEXT, value REAL)")  # of MLflow
    base.close()
    with pytest.raises(InputError, match=r"no known metric. Found: what trackio keeps \(other.db: Operational"):
        read_log(tmp_path / "other.db")


def test_a_state_of_trl_comes_before_what_a_tracker_keeps(tmp_path):
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"max_steps": 9, "log_history": [{"step": 1, "reward": 1}]})
    )
    (tmp_path / "run-ab.wandb").write_bytes(b":W&B\xe1\xbe\0")
    assert read_log(tmp_path)[1:] == (9, "TRL, trainer_state.json")


def test_packed(tmp_path):
    whole = gzip.compress(LINES.encode())
    for name, text in {"log.jsonl.gz": whole, "no_ending": whole}.items():
        (tmp_path / name).write_bytes(text)
        assert len(read_log(tmp_path / name).rows) == 30
    (tmp_path / "cut.gz").write_bytes(whole[:-20])
    with pytest.raises(InputError, match=r"cut.gz cannot be read \(Compressed file ended before"):
        read_log(tmp_path / "cut.gz")
    (tmp_path / "tar.gz").write_bytes(gzip.compress(b"log.txt" + bytes(93) + b"0000644" + LINES.encode()))
    (tmp_path / "wandb.gz").write_bytes(gzip.compress(b":W&B\xe1\xbe\0" + bytes(9) + b"x"))
    for name in ("tar.gz", "wandb.gz"):
        with pytest.raises(InputError, match=r"is a binary file, not text; give .* the unpacked files of W&B"):
            read_log(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("packed", [False, True])
def test_pipes(tmp_path, packed, monkeypatch):
    text = gzip.compress(LINES.encode()) if packed else LINES.encode()

    def piped():
        os.mkfifo(pipe := tmp_path / f"pipe{len(list(tmp_path.iterdir()))}")
        threading.Thread(target=lambda: pipe.write_bytes(text), daemon=True).start()
        return pipe

    assert reward_of(read_log(piped())) == [(n, n / 10) for n in range(1, 31)]
    monkeypatch.setattr(logs, "MOST_BYTES", 99)
    with pytest.raises(InputError, match="GiB or more; give a file, or a part of it"):
        read_log(piped())


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="this system has no /dev/stdin")
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(name):
    code = "from oblrpo.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code, "diagnose", name, "--json"],
        input=LINES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(found.stdout)["steps"] == 30
    assert found.returncode == 0
    with pytest.raises(InputError, match="cannot be read"):
        diagnose(Path("/dev/null"))
