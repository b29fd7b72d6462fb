"""The conductor starts the runs of a plan as they become possible, reports on them, and keeps how they ended."""

import shutil
import time
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from rich.console import Console
from rich.live import Live

from oblrpo.compare import training
from oblrpo.compare.plan import Plan, PlannedRun
from oblrpo.errors import InputError
from oblrpo.report.html import seen
from oblrpo.runs import locked


class Training(NamedTuple):
    """A run in progress, its process, and when that began."""

    run: PlannedRun
    process: BaseProcess
    begun: float


class Conductor:
    """One call of `oblrpo compare`. Runs are known by their folders; the next call tries failed ones again."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.processes = plan.processes()
        self.ended: dict[str, str] = {}
        """Runs that need nothing more, with an empty text, and those that failed in this call, with the reason."""
        self.running: dict[str, Training] = {}
        self.later: dict[str, list[PlannedRun]] = {}
        """By variant, the runs at the rate that its search chose."""
        self._begun, self._done_before = time.monotonic(), 0

    def run(self) -> None:
        """Train every run that is not done; a KeyboardInterrupt comes out once runs in progress have saved."""
        for run in self.plan.all_known():
            self._check(run)
        if self.ended:
            self._done_before = len(self.ended)
            self._say(f"{len(self.ended)} of {self.plan.count()} runs are already done")
        try:
            if len(self.ended) < self.plan.count():
                training.check(self.plan)
                self.plan.output.mkdir(parents=True, exist_ok=True)
                live = Live(console=self.console, refresh_per_second=2, transient=True, get_renderable=self.progress)
                with locked(self.plan.output), live if self.console.is_terminal else nullcontext():
                    self._train()
        except KeyboardInterrupt:
            self._stop()
            done = sum(map(self._is_done, self.plan.all_known()))
            raise KeyboardInterrupt(
                f"stopped with {done} of {self.plan.count()} runs finished; run the same command to continue."
            ) from None
        finally:
            for current in self.running.values():
                current.process.kill()

    def progress(self) -> str:
        """Say how far the runs in progress are, and how much time is left."""
        lines, share_done = [], 0.0
        for current in list(self.running.values()):
            row, steps = current.run.last_row(), current.run.config.run.steps
            where = "starting"
            if row:
                where = f"step {row['step']}/{steps}"
                where += "" if row.get("reward") is None else f", reward {row['reward']:.3f}"
                share_done += row["step"] / max(1, steps)
            lines.append(f"  {current.run.name}: {where}")
        spent, ended, total = time.monotonic() - self._begun, self._count_ended(), self.plan.count()
        done_here = ended - self._done_before + share_done
        times = f"{ended}/{total} runs, {timedelta(seconds=round(spent))}"
        if done_here > 0.2:  # before that nothing is known of the rest
            left = (total - ended - share_done) * spent / done_here
            times += f", about {timedelta(seconds=round(left))} left"
        return "\n".join([*lines, times])

    def _train(self) -> None:
        while True:
            for run in self._ready()[: self.processes - len(self.running)]:
                run.failed_file.unlink(missing_ok=True)
                self.running[run.place] = Training(run, training.start(run, self.processes), time.monotonic())
            if not self.running:
                return
            ended = wait([current.process.sentinel for current in self.running.values()])
            for current in list(self.running.values()):
                if current.process.sentinel in ended:
                    current.process.join()
                    del self.running[current.run.place]
                    self._end(current)

    def _end(self, ended: Training) -> None:
        run = ended.run
        self.ended[run.place] = ""
        if ended.process.exitcode == 0:
            if not self.plan.spec.keep_checkpoints and run.config.run.steps:
                shutil.rmtree(run.folder.checkpoints, ignore_errors=True)
            accuracy = run.final_accuracy()
            outcome = "no held-out accuracy" if accuracy is None else f"accuracy {accuracy:.3f}"
            self._report(run, "ready" if run.is_warm_start else outcome, ended)
            return
        if run.failure() is None:
            run.note_failure("failed", training.how_it_ended(ended.process))
        kind, message = run.failure() or ("", "")
        if kind != "diverged":
            self.ended[run.place] = f"{run.name}: {message}"
        self._report(run, f"{kind}: {message}", ended)

    def _report(self, run: PlannedRun, outcome: str, ended: Training | None = None) -> None:
        done = f"[{self._count_ended()}/{self.plan.count()}]"
        seconds = time.monotonic() - ended.begun if ended else 0.0
        failed = self.ended[run.place] or outcome.startswith("diverged")
        self._say(f"{done:>9} {run.name}: {outcome} ({seconds:.0f} s)", "yellow" if failed else None)

    def _say(self, line: str, style: str | None = None) -> None:
        self.console.print(seen(line), highlight=False, style=style)

    def _runs(self) -> list[PlannedRun]:
        return [run for v in self.plan.spec.variants for run in (*self.plan.search(v), *self.later.get(v.name, []))]

    def _ready(self) -> list[PlannedRun]:
        """Return what can start now; a warm start that several runs wait for comes first, and once."""
        for variant in self.plan.spec.variants:
            if variant.name in self.later or not all(run.place in self.ended for run in self.plan.search(variant)):
                continue
            self.later[variant.name] = self.plan.later(variant)
            for run in self.later[variant.name]:
                try:
                    self._check(run)
                except InputError as error:  # the others continue
                    self.ended[run.place] = f"{run.name}: {error}"
                    self._report(run, f"failed: {error}")
        # Seed by seed over all variants, so that what is there early can be compared.
        order = {seed: place for place, seed in enumerate(self.plan.spec.seeds)}
        wanted = [run for run in self._runs() if run.place not in self.ended]
        possible: dict[str, PlannedRun] = {}
        for run in sorted(wanted, key=lambda run: order[run.config.run.seed]):
            needed = run.start if run.start and not self._is_done(run.start) else run
            if needed.place not in self.running and needed.place not in self.ended:
                possible[needed.place] = needed
        return sorted(possible.values(), key=lambda run: run.config.run.steps > 0)

    def _check(self, run: PlannedRun) -> None:
        """Refuse a folder in the run's place that was made with other settings; note if nothing is left to do."""
        run.check_same()
        if run.is_done():
            self.ended[run.place] = ""

    def _is_done(self, run: PlannedRun) -> bool:
        if run.place not in self.ended and run.is_warm_start and run.is_done():
            self.ended[run.place] = ""  # the plan does not list it
        return self.ended.get(run.place) == ""

    def _count_ended(self) -> int:
        return sum(run.place in self.ended for run in self._runs())

    def _stop(self) -> None:
        self._say("stopping after the steps in progress; press Ctrl-C again to stop immediately")
        for current in self.running.values():
            current.process.terminate()
        for place, current in list(self.running.items()):
            current.process.join()
            del self.running[place]
            if current.process.exitcode == 0 or current.run.failure() is not None:
                self._end(current)
