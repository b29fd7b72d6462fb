"""Training processes: one for each run, which it trains as `oblrpo train` does; and one that checks runs beforehand.

On Linux they are forked from a process that has loaded torch and transformers, so that these load once; elsewhere,
where forks of such a process are not safe, each loads them itself.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from oblrpo.compare.plan import Run
from oblrpo.config import PolicyConfig, TrainConfig
from oblrpo.errors import DivergedError, InputError
from oblrpo.streams import steady

STOPPED = 130
"""The exit code of a process that was told to stop and has saved what there is."""

CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
CONTEXT.set_forkserver_preload(["oblrpo.compare.loaded"])


def start(run: Run, processes: int) -> BaseProcess:
    """Start a process that trains a run, or what is left of it, beside others: `processes` share the cores.

    It ends with 0 when the run is finished, and with `STOPPED` after SIGTERM, or when the process that started it has
    died, once the step in progress is done and saved. Any other code is a failure, which `run.failure()` explains if
    the process could still say why.
    """
    process: BaseProcess = CONTEXT.Process(target=_train, args=(run, processes), name=run.name)
    process.start()
    return process


def _train(run: Run, processes: int) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the parent alone, which ends its trainings in order
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    _print_to_log(run)
    try:
        _train_here(run, processes)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except InputError as error:
        print(f"oblrpo: {error}", flush=True)
        run.note_failure("diverged" if isinstance(error, DivergedError) else "failed", str(error))
        sys.exit(2)
    except Exception as error:  # a fault of ours or of a library: the other runs go on
        traceback.print_exc()
        run.note_failure("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        sys.exit(1)


def _train_here(run: Run, processes: int) -> None:
    import torch
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from oblrpo.trainer.loop import Trainer
    from oblrpo.trainer.progress import Progress

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))  # of large models; small ones take one
    begun = bool(run.folder.checkpoint_steps())
    if not begun:
        shutil.rmtree(run.folder.path, ignore_errors=True)  # stopped before its first checkpoint: it starts anew
    with Progress(Console(soft_wrap=True, markup=False)) as progress:
        Trainer(run.as_saved() if begun else run.config, resume=begun).run(progress)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _print_to_log(run: Run) -> None:
    """Let everything that this process prints go to the end of the run's log."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    steady()  # a character that the locale does not have must not end a run


def check(runs: list[Run], whole: list[Run]) -> None:
    """Check in a process of its own that runs can work: the settings of all, and `whole` ones by building them.

    Raises:
        InputError: the first that cannot work, by its name.
        RuntimeError: the process died.
    """
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_check, args=(runs, whole, sender))
    process.start()
    sender.close()
    try:
        mistake = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that checks the runs has died: {how_it_ended(process)}") from None
    finally:
        process.kill()
        process.join()
    if mistake:
        raise InputError(mistake)


def _check(runs: list[Run], whole: list[Run], sender: Connection) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        sender.send(first_mistake(runs, whole))


def first_mistake(runs: list[Run], whole: list[Run]) -> str:
    """Say what is wrong with the first run that cannot work; empty if all can."""
    from oblrpo.trainer.setup import check as check_settings

    for test, tested in ((check_settings, runs), (_build, whole)):
        for run in tested:
            try:
                test(run.config)
            except InputError as error:
                return f"{run.name}: {error}"
    return ""


def _build(config: TrainConfig) -> None:
    """Build a run, with a small policy in place of a named model, and let it go.

    Raises:
        InputError: as `Trainer` raises, or the model is not there.
    """
    from oblrpo.objects import Objects
    from oblrpo.policy import stand_in
    from oblrpo.trainer.loop import Trainer

    if not config.policy.model:
        Trainer(config)
        return
    policy, asked = stand_in(config.policy), config.policy
    kept = {name: getattr(asked, name) for name in ("model", "device", "chat", "system_prompt", "chat_template_args")}
    objects = Objects(model=policy.model, tokenizer=policy.tokenizer)
    Trainer(replace(config, policy=PolicyConfig(**kept)), objects=objects)


def how_it_ended(process: BaseProcess) -> str:
    """Say how a process ended that could not say so itself."""
    code = process.exitcode
    assert code is not None
    if code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return "its process was told to stop" if code == STOPPED else f"its process ended with exit code {code}"
