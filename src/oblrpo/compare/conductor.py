"""Hands the runs of a plan to workers in the order in which they become possible, and keeps what became of them."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field

from oblrpo.compare.board import Board
from oblrpo.compare.plan import Plan, Run
from oblrpo.compare.pool import Event, Pool, Worker
from oblrpo.compare.spec import Variant
from oblrpo.config import TrainConfig
from oblrpo.errors import InputError
from oblrpo.runs import held
from oblrpo.settings import flatten


@dataclass
class Conductor:
    """One call of `oblrpo compare`. `settled` and `failed` hold folders; the next call tries failed runs again."""

    plan: Plan
    processes: int
    board: Board
    pool: Pool = field(default_factory=Pool)
    settled: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    running: dict[Worker, tuple[Run, float]] = field(default_factory=dict)
    later: dict[str, list[Run]] = field(default_factory=dict)
    idle: set[Worker] = field(default_factory=set)
    loading: set[Worker] = field(default_factory=set)

    def run(self) -> None:
        """Run all that is not settled.

        Raises:
            InputError: a folder holds a run of other settings, a config cannot work, or another process is at it;
                nothing has started then.
            KeyboardInterrupt: stopped; the runs in progress have saved what there is.
        """
        for run in self.plan.all_known():
            run.check_same()
            if run.settled():
                self.settled.add(run.config.run.output)
        known = self.plan.all_known()
        self.board.found(run for run in known if run.config.run.output in self.settled)
        try:
            if len(self.settled) < self.plan.count():
                check(self.plan, self.pool)
                self.plan.output.mkdir(parents=True, exist_ok=True)
                with held(self.plan.output):
                    self._go_on()
        except KeyboardInterrupt:
            self._stop()
            there = sum(run.config.run.output in self.settled for run in self.plan.all_known())
            raise KeyboardInterrupt(
                f"stopped with {there} of {self.plan.count()} runs finished; the same command goes on."
            ) from None
        finally:
            self.pool.kill()

    def _go_on(self) -> None:
        self.idle |= self.pool.workers
        while True:
            if len(self.running) < self.processes:
                ready = self._ready()
                if not self.running and not ready:
                    return
                self._hand_out(ready)
            for worker, event in self.pool.events(1.0):
                self._note(worker, event)

    def _ready(self) -> list[Run]:
        """What can start now; warm starts that several runs wait for come first, and once."""
        busy = {run.config.run.output for run, _ in self.running.values()}
        possible: dict[str, Run] = {}
        for run in self._wanted():
            needed = run
            if run.start is not None and not self._is_settled(run.start):
                needed = run.start
            place = needed.config.run.output
            if place not in busy and place not in self.failed:
                possible[place] = needed
        return sorted(possible.values(), key=lambda run: run.config.run.steps > 0)

    def _wanted(self) -> list[Run]:
        """Runs not settled, seed by seed over all variants, so that what is there early can be compared."""
        runs = [run for v in self.plan.spec.variants for run in (*self.plan.search(v), *self._later(v))]
        order = {seed: place for place, seed in enumerate(self.plan.spec.seeds)}
        missing = [r for r in runs if not self._is_settled(r) and r.config.run.output not in self.failed]
        return sorted(missing, key=lambda run: order[run.config.run.seed])

    def _later(self, variant: Variant) -> list[Run]:
        """The runs at the rate that a variant's search chose, once it has."""
        ended = all(self._is_settled(r) or r.config.run.output in self.failed for r in self.plan.search(variant))
        if ended and variant.name not in self.later:
            self.later[variant.name] = self.plan.later(variant)
            for run in self.later[variant.name]:
                self._admit(run)
        return self.later.get(variant.name, [])

    def _admit(self, run: Run) -> None:
        """Look at what lies where a run goes that was not known at the beginning."""
        try:
            run.check_same()
            if run.settled():
                self.settled.add(run.config.run.output)
                self.board.known(run)
        except InputError as error:  # the others go on
            self.failed[run.config.run.output] = f"{run.name}: {error}"
            self.board.ended(run, f"failed: {error}")

    def _is_settled(self, run: Run) -> bool:
        place = run.config.run.output
        if place not in self.settled and run.start is None and not run.config.run.steps and run.settled():
            self.settled.add(place)  # a shared warm start, which the plan does not list
        return place in self.settled

    def _hand_out(self, ready: list[Run]) -> None:
        for run in ready:
            if len(self.running) >= self.processes:
                return
            if not self.idle:
                wanted = min(self.processes, len(self.running) + len(ready))
                while len(self.running) + len(self.loading) < wanted:
                    self.loading.add(self.pool.start())
                return
            worker = self.idle.pop()
            self.running[worker] = run, time.monotonic()
            run.forget_failure()
            begun = run.folder.latest_checkpoint() is not None
            config = run.as_saved() if begun else run.config
            worker.send(request("train", self.processes, settings=_settings(config, run), log=str(run.log)))
            self.board.progress(run, 0.0, "starting")

    def _note(self, worker: Worker, event: Event) -> None:
        kind = event["event"]
        if kind == "ready":
            self.loading.discard(worker)
            self.idle.add(worker)
            return
        if kind == "died" and worker in self.loading:
            raise RuntimeError(f"a worker process could not start: {event['message']}")
        if worker not in self.running:
            self.idle.discard(worker)
            return
        run, begun = self.running[worker]
        if kind == "step":
            self.board.progress(run, event["done"], event["note"])
            return
        del self.running[worker]
        if kind != "died":
            self.idle.add(worker)
        self._settle(run, event, time.monotonic() - begun)

    def _settle(self, run: Run, event: Event, seconds: float) -> None:
        place, kind = run.config.run.output, event["event"]
        if kind == "done":
            self.settled.add(place)
            if not self.plan.spec.keep_checkpoints and run.config.run.steps:
                shutil.rmtree(run.folder.checkpoints, ignore_errors=True)
            self.board.ended(run, seconds=seconds)
            return
        outcome, message = event.get("kind", "failed"), event.get("message", "its process was told to stop")
        run.note_failure(outcome, message)
        if outcome == "diverged":
            self.settled.add(place)
        else:
            self.failed[place] = f"{run.name}: {message}"
        self.board.ended(run, f"{outcome}: {message}", seconds)

    def _stop(self) -> None:
        """Let the runs in progress finish their step and save."""
        self.board.console.print("stopping after the steps in progress; once more to stop at once", highlight=False)
        for worker, event in self.pool.dismiss():
            if worker in self.running and event["event"] in {"done", "stopped", "died", "failed"}:
                run, begun = self.running.pop(worker)
                if event["event"] in {"done", "failed"}:
                    self._settle(run, event, time.monotonic() - begun)
                else:
                    self.board.paused(run)


def check(plan: Plan, pool: Pool) -> None:
    """Let a worker check every config before anything starts; it stays in the pool.

    Raises:
        InputError: the first that cannot work, by the name of its run.
        RuntimeError: the worker could not start.
    """
    runs = []
    for variant in plan.spec.variants:
        for number, rate in enumerate(variant.learning_rates):
            run = plan.run(variant, rate, plan.spec.seeds[0])
            config = plan.spec.config(variant, rate, plan.spec.seeds[0], run.config.run.output)
            runs.append({"name": run.name, "settings": flatten(config), "whole": number == 0})
    worker = pool.start()
    worker.send(request("check", 1, runs=runs))
    while True:
        for _, event in pool.events(1.0):
            if event["event"] == "died":
                raise RuntimeError(f"a worker process could not start: {event['message']}")
            if event["event"] == "checked":
                if event["error"]:
                    raise InputError(event["error"])
                return


def request(do: str, processes: int, **fields: object) -> dict[str, object]:
    """A request to a worker; `processes` share the machine's cores."""
    return {"do": do, "processes": processes} | fields


def _settings(config: TrainConfig, run: Run) -> dict[str, object]:
    return flatten(config) | {"output": run.config.run.output}
