"""Training runs side by side, each in a process of its own on one thread, with the CPU time of every step."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lab.benchmarks.runs import rows
from lab.results.book import Book, Run
from oblrpo.compare.training import CONTEXT, how_it_ended
from oblrpo.settings import TrainConfig, load_recipe, with_settings

Settings = Mapping[str, Any]


def train_all(book: Book, runs: Mapping[Run, tuple[str, Settings]], folder: Path, processes: int) -> None:
    """Every run that the book does not have, some at a time: a recipe each, and settings over it.

    A run's folder goes when its lines are in the book.

    Raises:
        RuntimeError: a run failed; the others have been stopped.
    """
    waiting = [run for run in runs if run not in book.runs]
    running: dict[Run, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                run = waiting.pop(0)
                recipe, settings = runs[run]
                running[run] = start(recipe, dict(settings), folder / run.place)
            wait([process.sentinel for process in running.values()])
            for run in [run for run, process in running.items() if process.exitcode is not None]:
                process, output = running.pop(run), folder / run.place
                if process.exitcode:
                    raise RuntimeError(f"{output}: {how_it_ended(process)}; its log: {output}.log")
                steps = runs[run][1].get("steps") or load_recipe(runs[run][0], TrainConfig()).run.steps
                metrics = rows(output, steps)
                assert metrics is not None, f"{output} has ended before its last step"
                book.add(run, metrics)
                accuracies = [line.accuracy for line in book.runs[run] if line.accuracy is not None]
                shown = " ".join(f"{accuracy:.3f}" for accuracy in accuracies)
                print(*run, shown, f"{book.runs[run][-1].cpu_seconds:.0f} CPU s", flush=True)
                shutil.rmtree(output)
    finally:
        for process in running.values():
            process.terminate()


def start(recipe: str, settings: dict[str, Any], output: Path) -> Any:
    """A process that trains a run, or what is left of it, and ends with 0 when it is done.

    The setting `rule` is the laboratory's: which rule of `lab.results.tried` the schedule `auto` has.
    """
    process = CONTEXT.Process(target=_train, args=(recipe, settings | {"output": str(output)}))
    process.start()
    return process


def _train(recipe: str, settings: dict[str, Any]) -> None:
    output = Path(settings["output"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{output}.log").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from oblrpo.report.console import Progress
    from oblrpo.trainer.loop import Trainer

    class Timed(Trainer):
        """A run that notes the CPU time of its steps, without that of held-out accuracy."""

        aside = 0.0

        def _step(self, step: int) -> tuple[dict[str, Any], str]:
            begun, self.aside = time.process_time(), 0.0
            metrics, skipped = super()._step(step)
            return metrics | {"cpu_time": time.process_time() - begun - self.aside}, skipped

        def _accuracy(self, step: int, progress: Progress | None = None) -> dict[str, float]:
            begun = time.process_time()
            found = super()._accuracy(step, progress)
            self.aside = time.process_time() - begun
            return found

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if rule := settings.pop("rule", ""):
        from lab.results.tried import adopt

        adopt(rule)
    config = with_settings(load_recipe(recipe, TrainConfig()), {"threads": 1} | settings, output.name)
    begun = (output / "checkpoints").is_dir() and any((output / "checkpoints").iterdir())
    if not begun:
        shutil.rmtree(output, ignore_errors=True)
    try:
        with Progress(Console(soft_wrap=True, markup=False)) as progress:
            Timed(config, resume=begun).run(progress)
    except KeyboardInterrupt:
        sys.exit(130)
