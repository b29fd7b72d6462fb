"""The processes that a worker has started, and their end, those in a session of their own among them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

MARK = "OBLRPO_WORKER"
"""The environment variable by which a worker's processes are known."""


def end_tree(pid: int, mark: str) -> None:
    """Kill a process, its group, and on Linux all processes that it started.

    These are its descendants and whatever carries `mark` in its environment, in whatever session. Only a process that
    was orphaned, in a session and an environment of its own, is not found.
    """
    for _ in range(20):  # one may start another while we look
        found = _tree(pid, mark)
        for each in found:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        if not found:
            break
    with suppress(AttributeError, OSError):  # Windows has no groups; this one may have ended
        os.killpg(pid, signal.SIGKILL)


def _tree(pid: int, mark: str) -> set[int]:
    """The living processes that `end_tree` is to end, this one not among them; none where there is no /proc."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
    found |= {pid} & parents.keys()
    while further := {each for each, parent in parents.items() if parent in found} - found:
        found |= further
    return found - {os.getpid()}
