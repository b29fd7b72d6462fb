"""A disk that refuses: one sentence, what was there is whole, and the run goes on when there is room."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from oblrpo.checksums import write_sums
from oblrpo.runs import RunFolder
from tests.cli.conftest import DENSE_REWARD, NO_PAGE, SMALL, Fork, complained, metrics_of

FLAGS = [str(x) for pair in SMALL.items() for x in pair]


def limited(output, *further, most):
    """The small run in a process that may write no file of more bytes than `most`."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
    process = Fork(["train", *FLAGS, "--output", str(output), *further], code)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("most", [100, 20_000])
@pytest.mark.usefixtures("dense_reward")
def test_files_that_may_not_be_longer(small_run, oblrpo, tmp_path, most):
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert small_run(output=whole)[0] == 0
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


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.parametrize("kind", [OSError(28, "No space left on device"), Exception("No space left (os error 28)")])
def test_a_disk_that_is_full_in_the_middle(small_run, oblrpo, tmp_path, monkeypatch, kind):
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert small_run(output=whole)[0] == 0
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


def mounted(folder, options, inner):
    """Run a shell command where `folder` is a tmpfs of its own, mounted with options; skip where that is refused."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare: only a file system of its own can be full or read-only for root")
    mount = f"mount -t tmpfs -o {options} tmpfs {folder}"
    flags = ["-m"] if os.geteuid() == 0 else ["-m", "-r"]
    if subprocess.run(["unshare", *flags, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    command = ["unshare", *flags, "sh", "-c", f"{mount} && {inner}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


TRAIN = shlex.join(
    [sys.executable, "-c", DENSE_REWARD + NO_PAGE + "from oblrpo.cli import main; main()", "train", *FLAGS]
)


@pytest.mark.slow
def test_a_disk_without_room_and_then_with_it(oblrpo, tmp_path):
    """Full in the middle of a checkpoint; what was written is whole, and the run goes on in more room."""
    room, copy = tmp_path / "room", tmp_path / "copy"
    room.mkdir()
    done = mounted(room, "size=200k", f"{TRAIN} --output {room}/run; code=$?; cp -r {room}/run {copy}; exit $code")
    complained((done.returncode, done.stdout, done.stderr), "the disk refused", "No space left on device")
    assert RunFolder(copy).newest_whole()[0] is not None
    code, _, err = oblrpo("train", "--resume", "--output", copy)
    assert code == 0, err
    assert [row["step"] for row in metrics_of(copy)] == list(range(5))


def test_an_output_that_is_read_only(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    make = f"from pathlib import Path; from oblrpo.runs import RunFolder; RunFolder(Path('{room}/run')).make()"
    done = mounted(room, "ro", shlex.join([sys.executable, "-c", make]))
    assert "InputError: cannot create" in done.stderr
    assert "Read-only file system" in done.stderr


@pytest.mark.usefixtures("dense_reward")
def test_a_run_that_has_become_read_only(small_run, tmp_path):
    assert small_run(steps=2)[0] == 0
    run, room = tmp_path / "run", tmp_path / "room"
    room.mkdir()
    inner = f"cp -r {run} {room}/run && mount -o remount,ro {room} && {TRAIN} --resume --output {room}/run --steps 4"
    done = mounted(room, "size=10m", inner)
    complained((done.returncode, done.stdout, done.stderr), "Read-only file system")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_folder_that_is_not_ours(small_run, tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o500)
    complained(small_run(output=tmp_path / "theirs" / "run"), "Permission denied")
