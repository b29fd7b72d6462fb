"""A disk that refuses: one sentence, what was there is whole, and the run goes on when there is room."""

import os

import pytest

from oblrpo.checksums import write_sums
from oblrpo.runs import RunFolder
from tests.cli.conftest import SMALL, Fork, complained, metrics_of

FLAGS = [str(x) for pair in SMALL.items() for x in pair]


def limited(output, *further, most):
    """The small run in a process that may write no file of more bytes than `most`."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
    process = Fork(["train", *FLAGS, "--output", str(output), *further], code)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("most", [100, 20_000])
def test_files_that_may_not_be_longer(whole, oblrpo, tmp_path, most):
    output = tmp_path / "run"
    complained(limited(output, most=most), "the disk refused", "File too large")
    begun = (output / "config.yaml").is_file()
    result = oblrpo("train", *FLAGS, "--output", output, *(["--resume"] if begun else []))
    assert result[0] == 0, result
    assert metrics_of(output) == metrics_of(whole)


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "y" * 300, "x/" * 3000])
def test_names_that_are_too_long(small_run, tmp_path, name):
    complained(small_run(output=tmp_path / name), "File name too long")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_output_below_a_file(small_run, tmp_path):
    (tmp_path / "file").write_text("")
    complained(small_run(output=tmp_path / "file" / "run"), "Not a directory")


@pytest.mark.parametrize("kind", [OSError(28, "No space left on device"), Exception("No space left (os error 28)")])
def test_a_disk_that_is_full_in_the_middle(whole, small_run, oblrpo, tmp_path, monkeypatch, kind):
    output = tmp_path / "run"
    calls = iter(range(100))

    def full(folder):
        if next(calls) == 2:
            raise kind
        write_sums(folder)

    with monkeypatch.context() as patched:
        patched.setattr("oblrpo.runs.folder.write_sums", full)
        complained(small_run(output=output), "No space left on device")
    assert "No space left on device" in (output / "failure.txt").read_text()
    assert oblrpo("train", "--resume", "--output", output)[0] == 0
    assert metrics_of(output) == metrics_of(whole)


MOUNTED = """
import ctypes, os, shutil, subprocess
from oblrpo import cli
def call(*words):
    return subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode
if ctypes.CDLL(None).unshare(0x20000) or call("mount", "--make-rprivate", "/"):
    os._exit(77)
if call("mount", "-t", "tmpfs", "-o", "size={size}", "tmpfs", {room!r}):
    os._exit(77)
"""
"""The file system is this process's own from here on (CLONE_NEWNS), and the room a tmpfs in it."""


def mounted(room, size, words, before="", after=""):
    """The small run in a process for which the room is a file system of its own; code runs `before` it and `after`."""
    room.mkdir()
    code = MOUNTED.format(size=size, room=str(room)) + before
    code += f"run = cli.main\ndef main():\n    try: run()\n    finally: {after or 'pass'}\ncli.main = main\n"
    process = Fork(["train", *FLAGS, *map(str, words)], code)
    out, err = process.communicate()
    if process.returncode == 77:
        pytest.skip("only a file system of its own can be full or read-only for root, and mounting is not allowed here")
    return process.returncode, out, err


@pytest.mark.slow
def test_a_disk_without_room_and_then_with_it(oblrpo, tmp_path):
    """Full in the middle of a checkpoint; what was written is complete, and the run resumes in more room."""
    room, copy = tmp_path / "room", tmp_path / "copy"
    after = f"shutil.copytree({str(room / 'run')!r}, {str(copy)!r})"
    result = mounted(room, "200k", ["--output", room / "run"], after=after)
    complained(result, "the disk refused", "No space left on device")
    assert RunFolder(copy).newest_whole()[0] is not None
    code, _, err = oblrpo("train", "--resume", "--output", copy)
    assert code == 0, err
    assert [row["step"] for row in metrics_of(copy)] == list(range(5))


@pytest.mark.parametrize("words", [[], ["--resume", "--steps", 5]], ids=["new", "resumed"])
def test_an_output_that_is_read_only(run, tmp_path, words):
    room = tmp_path / "room"
    begun = f"shutil.copytree({str(run)!r}, {str(room / 'run')!r})\n" if words else ""
    before = begun + f"assert not call('mount', '-o', 'remount,ro', {str(room)!r})\n"
    result = mounted(room, "10m", [*words, "--output", room / "run"], before)
    complained(result, "Read-only file system")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_folder_that_is_not_ours(small_run, tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o500)
    complained(small_run(output=tmp_path / "theirs" / "run"), "Permission denied")
