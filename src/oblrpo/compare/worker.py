"""`python -m oblrpo.compare.worker`: a process that trains one run after the other; torch and transformers load once.

It reads requests from stdin and writes events to stdout, one JSON object a line. What libraries print goes to the run's
log. The end of stdin ends it: at once when idle, else after the step in progress and its checkpoint, as SIGTERM does.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from oblrpo.config import TrainConfig
from oblrpo.errors import DivergedError, InputError
from oblrpo.settings import with_settings

Tell = Callable[..., None]


def main() -> None:
    """Serve until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not speak to the parent

    def tell(event: str, **fields: Any) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more: the run in progress must still be saved
            channel.write(json.dumps({"event": event} | fields) + "\n")

    requests = _requests()
    import torch
    from transformers.utils import logging as transformers_logging

    import oblrpo.compare.check  # noqa: F401 - the trainer, loaded before the first request comes

    transformers_logging.disable_progress_bar()
    cores = torch.get_num_threads()
    tell("ready")
    while (request := requests.get()) is not None:
        torch.set_num_threads(max(1, cores // request["processes"]))  # of large models; small ones take one
        serve(request, tell)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.stdout.flush()


def serve(request: dict[str, Any], tell: Tell) -> None:
    """Check configs, or train one."""
    if request["do"] == "check":
        tell("checked", error=first_mistake(request["runs"]))
        return
    with _printing_to(Path(request["log"])) as log:
        try:
            train(_config(request["settings"]), log, tell)
            tell("done")
        except KeyboardInterrupt:
            tell("stopped")
        except InputError as error:
            print(f"oblrpo: {error}", file=log, flush=True)
            tell("failed", kind="diverged" if isinstance(error, DivergedError) else "failed", message=str(error))
        except Exception as error:  # a fault of ours or of a library: the other runs go on
            traceback.print_exc(file=log)
            log.flush()
            message = " ".join(str(error).split())[:300]
            tell("failed", kind="failed", message=f"{type(error).__name__}: {message}")


def first_mistake(runs: list[dict[str, Any]]) -> str:
    """What is wrong with the first run that cannot work; empty if all can. `whole` ones are built."""
    from oblrpo.compare.check import check_settings, check_whole

    for run in runs:
        try:
            (check_whole if run["whole"] else check_settings)(_config(run["settings"]))
        except InputError as error:
            return f"{run['name']}: {error}"
    return ""


def train(config: TrainConfig, log: TextIO, tell: Tell) -> None:
    """One run, or what is left of it, exactly as `oblrpo train` does it, without the page.

    Raises:
        InputError: as `Trainer` raises.
        KeyboardInterrupt: it was told to stop, and has saved what there is.
    """
    from rich.console import Console

    from oblrpo.runs import RunFolder
    from oblrpo.trainer.loop import Trainer
    from oblrpo.trainer.progress import Progress

    class Told(Progress):
        """The lines of a log, and every step told to the parent."""

        def warm_start(self, step: int, loss: float) -> None:
            super().warm_start(step, loss)
            tell("step", done=(step + 1) / config.warm_start.warm_start_steps, note=f"warm start {step + 1}")

        def step(self, step: int, metrics: dict[str, Any]) -> None:
            super().step(step, metrics)
            reward = f", reward {metrics['reward']:.3f}" if step else ""
            tell("step", done=step / max(1, config.run.steps), note=f"step {step}/{config.run.steps}{reward}")

    folder = RunFolder(Path(config.run.output))
    begun = folder.latest_checkpoint() is not None
    if not begun:
        shutil.rmtree(folder.path, ignore_errors=True)  # stopped before its first checkpoint: nothing to go on from
    with Told(Console(file=log, soft_wrap=True, markup=False)) as progress:
        Trainer(config, resume=begun).run(progress)


def _config(settings: dict[str, Any]) -> TrainConfig:
    return with_settings(TrainConfig(), settings, "this run")


def _requests() -> queue.SimpleQueue[dict[str, Any] | None]:
    """Requests as they come, None at the end; the end while a run goes on stops the run."""
    found: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            found.put(json.loads(line))
        found.put(None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    return found


@contextmanager
def _printing_to(path: Path) -> Iterator[TextIO]:
    """Let everything the process prints go to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(2)
    with path.open("a", encoding="utf-8") as log:
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield log
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(before, 1)
            os.dup2(before, 2)
            os.close(before)


if __name__ == "__main__":
    main()
