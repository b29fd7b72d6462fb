"""What every training needs, loaded once by the process that training processes are forked from.

Nothing here may ask whether there is a GPU (tested): CUDA cannot be used in a fork of a process that has.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers a Ctrl-C, and ends its trainings in order

import oblrpo.trainer.loop  # noqa: E402, F401
