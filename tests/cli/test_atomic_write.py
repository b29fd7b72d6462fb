"""Files are replaced whole, and only files: a device or a pipe in their place is left alone."""

import os
import shutil
import stat

import pytest

from oblrpo.errors import InputError
from oblrpo.runs import RunFolder, check_writable, write_atomically


@pytest.mark.parametrize("write", [lambda path: write_atomically(path, "new"), check_writable], ids=["write", "check"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe", "dangling link"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind, write):
    target = tmp_path / "there"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    else:
        if kind == "link to a pipe":
            os.mkfifo(tmp_path / "pipe")
        target.symlink_to(tmp_path / "pipe")
    before = stat.S_IFMT(os.lstat(target).st_mode)
    with pytest.raises(InputError, match="not a regular file"):
        write(target)
    assert stat.S_IFMT(os.lstat(target).st_mode) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"there", "pipe"}


def test_a_file_is_replaced_and_a_check_leaves_it(tmp_path):
    target = tmp_path / "file"
    check_writable(target)
    assert not target.exists()
    target.write_text("old")
    check_writable(target)
    assert target.read_text() == "old"
    write_atomically(target, "new")
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_at_once_and_what_a_user_has_called_so(tmp_path, monkeypatch):
    """One of them is there in the end, whole; neither fails, and what is not theirs stays."""
    target, own = tmp_path / "file", tmp_path / ".file.partial"
    own.write_text("mine")

    def meanwhile(descriptor):
        monkeypatch.undo()
        write_atomically(target, "theirs, longer")
        check_writable(target)

    monkeypatch.setattr("oblrpo.runs.disk.os.fsync", meanwhile)
    write_atomically(target, "ours")
    assert target.read_text() == "ours"
    assert own.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"file", ".file.partial"}


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "half a pair: \ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_whole_until_it_is_gone(tmp_path, monkeypatch):
    """A reader never sees a part of one that is pruned, or replaced."""
    run, removed = RunFolder(tmp_path), []
    run.make()
    run.clean_up()
    real = shutil.rmtree

    def rmtree(path, **more):
        if path.exists():
            removed.append(path.name)
        real(path, **more)

    monkeypatch.setattr("oblrpo.runs.folder.shutil.rmtree", rmtree)
    for step in (1, 1, 2):
        run.save_checkpoint(step, lambda folder: folder.mkdir(), {"step": step}, keep=1)
    assert run.checkpoint_steps() == [2]
    assert removed == [".step_1.old.partial"] * 2


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "no/such/file"])
def test_where_no_file_can_be(tmp_path, name):
    with pytest.raises(InputError, match="cannot write to"):
        check_writable(tmp_path / name)
