"""What a run leaves on the disk, and how it is read again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oblrpo.runs.disk import check_writable, disk_trouble, held, write_atomically
from oblrpo.runs.folder import RunFolder, run_of
from oblrpo.runs.identity import Identity
from oblrpo.runs.rows import Metrics, heldout_accuracy_of, parsed, read_rows

if TYPE_CHECKING:
    from oblrpo.runs.state_files import load_state

__all__ = [
    "Identity",
    "Metrics",
    "RunFolder",
    "check_writable",
    "disk_trouble",
    "held",
    "heldout_accuracy_of",
    "load_state",
    "parsed",
    "read_rows",
    "run_of",
    "write_atomically",
]


def __getattr__(name: str) -> Any:
    # Reading what runs left behind needs no torch, which takes seconds to load.
    if name == "load_state":
        from oblrpo.runs.state_files import load_state

        return load_state
    raise AttributeError(name)
