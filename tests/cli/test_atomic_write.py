"""Files are replaced whole, and only files: a device or a pipe in their place is left alone."""

import os
import stat

import pytest

from oblrpo.errors import InputError
from oblrpo.runs import check_writable, write_atomically


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
    with pytest.raises(InputError, match="no regular file"):
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


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "no/such/file"])
def test_where_no_file_can_be(tmp_path, name):
    with pytest.raises(InputError, match="cannot write to"):
        check_writable(tmp_path / name)
