"""Training processes: one for each run, which it trains as `oblrpo train` does; and one that checks runs beforehand.

On Linux they are forked from a process that has loaded torch and transformers, so that these load once; elsewhere,
where forks of such a process are not safe, each loads them itself.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from oblrpo.compare.plan import Plan, PlannedRun
from oblrpo.compare.spec import Variant
from oblrpo.errors import DivergedError, InputError
from oblrpo.settings import PolicyConfig, TrainConfig
from oblrpo.streams import install_streams

STOPPED = 130  # the exit code of a process that was stopped and has saved its state
CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
CONTEXT.set_forkserver_preload(["oblrpo.compare.loaded"])


def start(run: PlannedRun, processes: int) -> BaseProcess:
    """Start a process that trains a run, or what is left of it, beside others: `processes` share the cores.

    It ends with 0 when the run is finished, and with `STOPPED` after SIGTERM, or when the process that started it has
    died, once the step in progress is done and saved. Any other code is a failure, which `run.failure()` explains if
    the process could still say why.
    """
    process: BaseProcess = CONTEXT.Process(target=_train, args=(run, processes), name=run.name)
    process.start()
    return process


def _train(run: PlannedRun, processes: int) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the parent alone, which ends its trainings in order
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    install_streams()  # a character that the locale does not have must not end a run
    try:
        import torch
        from rich.console import Console
        from transformers.utils import logging as transformers_logging

        from oblrpo.report.console import Progress
        from oblrpo.trainer.loop import Trainer

        transformers_logging.disable_progress_bar()
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))  # of large models; small ones take one
        begun = bool(run.folder.checkpoint_steps())
        if not begun:
            shutil.rmtree(run.folder.path, ignore_errors=True)  # stopped before its first checkpoint: it starts again
        with Progress(Console(soft_wrap=True, markup=False, emoji=False)) as progress:
            Trainer(run.as_saved() if begun else run.config, resume=begun).run(progress)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except InputError as error:
        print(f"oblrpo: {error}", flush=True)
        run.note_failure("diverged" if isinstance(error, DivergedError) else "failed", str(error))
        sys.exit(2)
    except Exception as error:  # a fault of ours or of a library: the other runs continue
        traceback.print_exc()
        run.note_failure("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        sys.exit(1)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def check(plan: Plan) -> None:
    """Refuse the first config that cannot work before anything starts, in a process that builds one of each variant."""
    variants, seed = plan.spec.variants, plan.spec.seeds[0]

    def with_own_start(variant: Variant, rate: float) -> PlannedRun:  # no shared one is there yet
        run = plan.run(variant, rate, seed)
        return PlannedRun(run.name, plan.spec.config(variant, rate, seed, run.place))

    runs = [with_own_start(variant, rate) for variant in variants for rate in variant.learning_rates]
    built = [with_own_start(variant, variant.learning_rates[0]) for variant in variants]
    if sys.platform == "linux":  # a Ctrl-C that comes before `loaded` ignores it must not reach the new process
        resource_tracker.ensure_running()  # it would let the signal through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process: BaseProcess = CONTEXT.Process(target=_send_first_mistake, args=(sender, runs, built))
    try:
        process.start()
        sender.close()
        mistake = receiver.recv()
    except EOFError:
        raise RuntimeError("the process that checks the runs has died (out of memory?)") from None
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    if isinstance(mistake, Exception):
        raise mistake
    if mistake:
        raise InputError(mistake)


def _send_first_mistake(sender: Connection, runs: list[PlannedRun], built: list[PlannedRun]) -> None:
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        sender.send(first_mistake(runs, built))
    except Exception as error:  # a fault of ours, or memory: the parent reports it
        sender.send(error)


def first_mistake(runs: list[PlannedRun], built: list[PlannedRun]) -> str:
    """Say what is wrong with the first run whose settings, or that when `built`, cannot work; empty if all can."""
    from oblrpo.trainer.check import check as check_settings

    for test, tested in ((check_settings, runs), (_build, built)):
        for run in tested:
            try:
                test(run.config)
            except InputError as error:
                return f"{run.name}: {error}"
    return ""


def _build(config: TrainConfig) -> None:
    """Build a run and drop it; a named model must be there, and a small policy stands in for it."""
    from oblrpo.objects import Objects
    from oblrpo.policy import stand_in
    from oblrpo.trainer.loop import Trainer

    if not config.policy.model:
        Trainer(config)
        return
    policy = stand_in(config.policy)
    names = ("model", "device", "chat", "system_prompt", "chat_template_args")
    light = PolicyConfig(**{name: getattr(config.policy, name) for name in names})
    Trainer(replace(config, policy=light), objects=Objects(model=policy.model, tokenizer=policy.tokenizer))


def how_it_ended(process: BaseProcess) -> str:
    """Say how a process ended that could not say so itself."""
    code = process.exitcode
    assert code is not None
    if code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return "its process was stopped" if code == STOPPED else f"its process ended with exit code {code}"
