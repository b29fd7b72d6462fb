"""Files that end: a pipe, a socket or a device may never, and who reads it would wait for ever."""

import errno
import os
import stat
from pathlib import Path


def regular(path: Path) -> Path:
    """Return the path of a regular file, or of a link to one; OSError for anything else, ValueError for a NUL."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # files of the kernel call themselves regular, and /proc/kmsg waits for its next message
    if not stat.S_ISREG(mode) or path.resolve().parts[1:2] in {("proc",), ("sys",)}:
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file", str(path))
    return path
