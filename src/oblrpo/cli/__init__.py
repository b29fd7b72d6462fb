"""The command line: parse, call, print. One module a command, loaded when it is called."""

import os
import sys
from collections.abc import Callable
from importlib import import_module

from oblrpo import __version__
from oblrpo.cli import interrupts
from oblrpo.errors import InputError, check_current_folder, did_you_mean
from oblrpo.streams import install_streams

COMMANDS = ("train", "compare", "evaluate", "diagnose", "report", "export")

USAGE = """\
oblrpo: RL of language models with the exact variance-optimal baseline and a learning rate that is measured, not set

  oblrpo train [RECIPE|FILE] [--any-setting VALUE ...]   train a policy; `oblrpo train --help` lists recipes, settings
  oblrpo compare [NAME|FILE] [--set YAML ...]            variants x learning rates x seeds side by side, on one page
  oblrpo evaluate [MODEL] [--benchmark NAME ...]         avg@k, pass@k of a model: benchmarks, or --data by --rewards
  oblrpo diagnose RUN|LOG [--look]                       what is wrong with a run of oblrpo, TRL or verl, and what to do
  oblrpo report RUN ... [--follow]                       one HTML page of a run, or of several; --follow as it trains
  oblrpo export RUN [--merge]                            the model of a run and its card, in a folder to share
  oblrpo help COMMAND                                    what a command takes; `oblrpo --version`

Try `oblrpo train demo --output runs/demo`: in two minutes a small policy learns to find routes in graphs."""


KEEP_RUNNING = {"train", "compare", "evaluate"}
"""Commands that keep running when nobody reads what they print (`| head`), for they leave files."""


def main() -> None:
    """Entry point of `oblrpo`."""
    run_command(dispatch, keep_running=bool(KEEP_RUNNING & set(sys.argv[1:2])))


def run_command(command: Callable[[list[str]], None], keep_running: bool = False) -> None:
    """Call a command with the words of the command line; with `keep_running` also when nobody reads its output.

    Raises:
        SystemExit: 2 after one sentence about what the user can fix, 130 when interrupted, 1 when nobody reads.
        Exception: a fault of ours, or of a library.
    """
    interrupts.catch()
    try:
        install_streams(keep_running)
        _explain(command, sys.argv[1:])
    except KeyboardInterrupt as stop:
        interrupts.report(str(stop))
        raise SystemExit(interrupts.STOPPED) from None


def _explain(command: Callable[[list[str]], None], argv: list[str]) -> None:
    try:
        command(argv)
    except Exception as error:
        if interrupts.caught():  # a library has made something else of it
            raise KeyboardInterrupt from None
        if isinstance(error, BrokenPipeError):  # `oblrpo train --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        from oblrpo.runs import disk_trouble

        sentence = str(error) if isinstance(error, InputError) else disk_trouble(error) or _out_of_memory(error)
        if not sentence:  # a fault of ours, or of a library
            raise
        from rich.console import Console

        from oblrpo.report.html import seen

        console = Console(stderr=True, soft_wrap=True)
        console.print(f"oblrpo: {seen(sentence)}", style="bold red", markup=False, highlight=False)
        raise SystemExit(2) from None


def _out_of_memory(error: Exception) -> str:
    """Say that an allocation failed: by torch's class of such errors on a GPU, by its allocator's name on a CPU."""
    failed = {"OutOfMemoryError", "MemoryError"} & {kind.__name__ for kind in type(error).__mro__}
    if not failed and "DefaultCPUAllocator" not in str(error):
        return ""
    what = (str(error).splitlines() or ["no memory for Python's own objects"])[0][:200]
    return (
        f"out of memory ({what}); set tokens_per_micro_batch for training or max_num_seqs for sampling, or lower "
        "max_completion_length or the model's size."
    )


def dispatch(argv: list[str]) -> None:
    """Run one command."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] in {"-h", "--help"}:
        print(USAGE)
    elif argv[0] in {"-V", "--version", "version"}:
        print(__version__)
    elif argv[0] in COMMANDS:
        check_current_folder()
        import_module(f"oblrpo.cli.{argv[0]}").run(argv[1:])
    else:
        raise InputError(f"unknown command {argv[0]!r}; known: {', '.join(COMMANDS)}.{did_you_mean(argv[0], COMMANDS)}")
