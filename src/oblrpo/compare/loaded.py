"""What every training needs, loaded once by the process that training processes are forked from.

Nothing here may ask whether there is a GPU (tested): CUDA cannot be used in a fork of a process that has.
"""

import signal
import sys
from typing import Any

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers a Ctrl-C, and ends its trainings in order
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _unless_left(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Say nothing in a fork whose parent was interrupted before it had handed over all of the work."""
    if not issubclass(kind, (EOFError, OSError)):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _unless_left

import oblrpo.trainer.loop  # noqa: E402, F401
