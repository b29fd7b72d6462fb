"""The libraries themselves, offline: what they kept is read back. Those that are not installed here are skipped."""

import json
import struct

import pytest

from oblrpo.runs import RunFolder
from oblrpo.runs.rows import NEEDED
from oblrpo.trackers import Reporter

SETTINGS = {"project": "tests", "steps": 9, "optimizer_args": {"momentum": 0.9}, "log_completions": True}
COMPLETIONS = [
    {"prompt": "1+1=", "completion": text, "reward": reward, "advantage": None}
    for text, reward in (("2", 1.0), ("3", 0.0))
]


def leg(folder, name, steps):
    with Reporter([name], folder, SETTINGS, pytest.fail) as reporter:
        for step in steps:
            further = {"warnings": ["look at this"]} if step == 2 else {}
            folder.completions.mkdir(exist_ok=True)
            folder.write_completions(step, COMPLETIONS)
            row = dict.fromkeys(NEEDED, 0.5) | {"step": step, "reward": step / 8, "score_norm2/mean": 2.0}
            reporter.log(folder.write_metrics(row | further))


def set_back(folder, step):
    """As if the run had been killed before the steps after this one were noted."""
    path = folder.path / "trackers.json"
    note = json.loads(path.read_text())
    for entry in note.values():
        entry["step"] = step
    path.write_text(json.dumps(note))


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    leg(folder, "tensorboard", range(6))
    folder.drop_metrics_after(3)
    set_back(folder, 4)  # step 5 is in the file, but not noted
    leg(folder, "tensorboard", range(4, 8))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward")] == [(step, step / 8) for step in range(8)]
    assert set(read.Tags()["scalars"]) == {*NEEDED, "score_norm2/mean"}
    texts = {
        key: [bytes(e.tensor_proto.string_val[0]).decode() for e in read.Tensors(key)] for key in read.Tags()["tensors"]
    }
    assert texts["warnings/text_summary"] == ["look at this"]
    assert len(texts["config/text_summary"]) == 1
    assert "    optimizer_args:\n      momentum: 0.9" in texts["config/text_summary"][0]


def wandb_records(path):
    """Payloads of a .wandb file: LevelDB's log format, blocks of 32 KiB."""
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7]) if left >= 7 else (0, 0)
        if kind == 0:
            at += left
            continue
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:
            yield part
            part = b""


@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path, monkeypatch):
    """Without any network or key; the newest folder holds the whole run."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = RunFolder(tmp_path)
    leg(folder, "wandb", range(6))
    folder.drop_metrics_after(3)
    leg(folder, "wandb", range(4, 8))
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]["id"]
    files = {path.resolve() for path in tmp_path.glob(f"wandb/offline-run-*-{identity}/*.wandb")}
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    history, tables = [], []
    for payload in wandb_records(newest):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            tables.append(items["completions/_type"] if "completions/_type" in items else items["completions"]["_type"])
            history.append((record.history.step.num, items["reward"], items["score_norm2/mean"]))
    assert history == [(step, step / 8, 2.0) for step in range(8)]
    assert tables == ["table-file"] * 8
    (file,) = newest.parent.glob("files/media/table/completions_2_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["step", "prompt", "completion", "reward", "advantage"]
    assert table["data"][0] == [2, "1+1=", "2", 1.0, None]


@pytest.mark.filterwarnings("default")
def test_a_run_that_the_program_has_open_in_wandb_stays_open(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = wandb.init(dir=str(tmp_path), mode="offline", settings=wandb.Settings(console="off", silent=True))
    leg(RunFolder(tmp_path), "wandb", range(3))
    assert wandb.run is mine
    mine.log({"x": 1})
    assert dict(mine.summary)["x"] == 1
    assert "reward" not in dict(mine.summary)
    mine.finish()


@pytest.mark.filterwarnings("default")
def test_trackio(tmp_path, monkeypatch):
    """Its database is where TRACKIO_DIR says; that is read when it is imported, so in a process of its own."""
    pytest.importorskip("trackio")
    import sqlite3
    import subprocess
    import sys

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "db"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for drop, steps in ((None, range(6)), (3, range(4, 8))):
        code = (
            "import pathlib; from oblrpo.runs import RunFolder; from tests.trackers.test_libraries import leg\n"
            f"folder = RunFolder(pathlib.Path({str(tmp_path)!r}))\n"
            f"if {drop}: folder.drop_metrics_after({drop})\n"
            f"leg(folder, 'trackio', {steps})"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with sqlite3.connect(tmp_path / "db" / "tests.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(metrics)["reward"]) for step, metrics in rows] == [(step, step / 8) for step in range(8)]
    tables = [json.loads(metrics)["completions"] for _, metrics in rows]
    assert all(table["_type"] == "trackio.table" for table in tables)
