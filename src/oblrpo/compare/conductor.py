"""The conductor starts the runs of a plan as they become possible, and keeps what became of them."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from oblrpo.compare import training
from oblrpo.compare.board import Board
from oblrpo.compare.plan import Plan, Run
from oblrpo.compare.spec import Variant
from oblrpo.errors import InputError
from oblrpo.runs import held


@dataclass(frozen=True)
class Training:
    """A run in progress and its process."""

    run: Run
    process: BaseProcess
    begun: float = field(default_factory=time.monotonic)


@dataclass
class Conductor:
    """One call of `oblrpo compare`. Runs are known by their folders; the next call tries failed ones again."""

    plan: Plan
    processes: int
    """How many trainings go on at a time."""
    board: Board
    settled: set[str] = field(default_factory=set)
    """Runs that need nothing more."""
    failed: dict[str, str] = field(default_factory=dict)
    """Runs that failed in this call, and why."""
    running: dict[str, Training] = field(default_factory=dict)
    later: dict[str, list[Run]] = field(default_factory=dict)
    """By variant, the runs at the rate that its search chose."""

    def run(self) -> None:
        """Train every run that is not settled.

        Raises:
            InputError: a folder holds a run of other settings, a config cannot work, or another process is at it;
                nothing has started then.
            KeyboardInterrupt: stopped; the runs in progress have saved what there is.
        """
        for run in self.plan.all_known():
            run.check_same()
            if run.settled():
                self.settled.add(run.place)
        self.board.found(run for run in self.plan.all_known() if self._is_settled(run))
        try:
            if len(self.settled) < self.plan.count():
                check(self.plan)
                self.plan.output.mkdir(parents=True, exist_ok=True)
                with held(self.plan.output):
                    self._go_on()
        except KeyboardInterrupt:
            self._stop()
            there = sum(run.place in self.settled for run in self.plan.all_known())
            raise KeyboardInterrupt(
                f"stopped with {there} of {self.plan.count()} runs finished; the same command goes on."
            ) from None
        finally:
            for each in self.running.values():
                each.process.kill()

    def _go_on(self) -> None:
        while True:
            for run in self._ready()[: self.processes - len(self.running)]:
                run.forget_failure()
                self.running[run.place] = Training(run, training.start(run, self.processes))
                self.board.started(run)
            if not self.running:
                return
            ended = wait([each.process.sentinel for each in self.running.values()])
            for each in [each for each in self.running.values() if each.process.sentinel in ended]:
                each.process.join()
                del self.running[each.run.place]
                self._settle(each)

    def _settle(self, ended: Training) -> None:
        run, seconds = ended.run, time.monotonic() - ended.begun
        if ended.process.exitcode == 0:
            self.settled.add(run.place)
            if not self.plan.spec.keep_checkpoints and run.config.run.steps:
                shutil.rmtree(run.folder.checkpoints, ignore_errors=True)
            self.board.ended(run, seconds=seconds)
            return
        if run.failure() is None:
            run.note_failure("failed", training.how_it_ended(ended.process))
        kind, message = run.failure() or ("", "")
        if kind == "diverged":
            self.settled.add(run.place)
        else:
            self.failed[run.place] = f"{run.name}: {message}"
        self.board.ended(run, f"{kind}: {message}", seconds)

    def _ready(self) -> list[Run]:
        """Return what can start now; a warm start that several runs wait for comes first, and once."""
        possible: dict[str, Run] = {}
        for run in self._wanted():
            waits = run.start is not None and not self._is_settled(run.start)
            needed = run.start if waits and run.start else run
            if needed.place not in self.running and needed.place not in self.failed:
                possible[needed.place] = needed
        return sorted(possible.values(), key=lambda run: run.config.run.steps > 0)

    def _wanted(self) -> list[Run]:
        """Return the runs to be done, seed by seed over all variants, so that what is there early can be compared."""
        runs = [run for v in self.plan.spec.variants for run in (*self.plan.search(v), *self._later(v))]
        order = {seed: place for place, seed in enumerate(self.plan.spec.seeds)}
        return sorted((run for run in runs if not self._has_ended(run)), key=lambda run: order[run.config.run.seed])

    def _later(self, variant: Variant) -> list[Run]:
        """Return the further runs at the rate that a variant's search chose, once it has."""
        if variant.name not in self.later and all(map(self._has_ended, self.plan.search(variant))):
            self.later[variant.name] = self.plan.later(variant)
            for run in self.later[variant.name]:
                self._admit(run)
        return self.later.get(variant.name, [])

    def _admit(self, run: Run) -> None:
        """Look at what lies where a run goes that was not known at the beginning."""
        try:
            run.check_same()
            if run.settled():
                self.settled.add(run.place)
                self.board.known(run)
        except InputError as error:  # the others go on
            self.failed[run.place] = f"{run.name}: {error}"
            self.board.ended(run, f"failed: {error}")

    def _has_ended(self, run: Run) -> bool:
        return self._is_settled(run) or run.place in self.failed

    def _is_settled(self, run: Run) -> bool:
        if run.place not in self.settled and run.is_warm_start and run.settled():
            self.settled.add(run.place)  # the plan does not list it
        return run.place in self.settled

    def _stop(self) -> None:
        """Let the trainings finish their step and save."""
        self.board.console.print("stopping after the steps in progress; once more to stop at once", highlight=False)
        for each in self.running.values():
            each.process.terminate()
        for place, each in list(self.running.items()):
            each.process.join()
            del self.running[place]
            if each.process.exitcode == 0 or each.run.failure() is not None:
                self._settle(each)
            else:
                self.board.paused(each.run)


def check(plan: Plan) -> None:
    """Check every config before anything starts; one of each variant is built.

    Raises:
        InputError: the first that cannot work, by the name of its run.
        RuntimeError: the process that checks them died.
    """
    seed = plan.spec.seeds[0]

    def alone(variant: Variant, rate: float) -> Run:
        """The run with a warm start of its own, as no shared one is there yet."""
        run = plan.run(variant, rate, seed)
        return Run(run.name, plan.spec.config(variant, rate, seed, run.place))

    variants = plan.spec.variants
    runs = [alone(variant, rate) for variant in variants for rate in variant.learning_rates]
    training.check(runs, whole=[alone(variant, variant.learning_rates[0]) for variant in variants])
