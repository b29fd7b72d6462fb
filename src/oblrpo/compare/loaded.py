"""What every training needs, loaded once by the process that training processes are forked from.

Only that process imports this module: it must not be ended by a Ctrl-C, which the parent of the trainings answers.
Nothing here may ask whether there is a GPU (tested): CUDA cannot be used in a fork of a process that has.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)

import oblrpo.trainer.loop  # noqa: E402, F401
