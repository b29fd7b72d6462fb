"""What a person sees while a comparison runs: a live table on a terminal, a line for every run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from oblrpo.compare.plan import Plan, Run


class Board:
    """Tells which runs are settled, how far those in progress are, and how much time is left."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console = plan, console
        self._total = plan.count()
        self._ended: dict[str, str] = {}
        self._running: dict[str, Run] = {}
        self._begun, self._fresh = time.monotonic(), 0
        self._live = Live(console=console, refresh_per_second=2, transient=True, get_renderable=self._render)

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def found(self, runs: Iterable[Run]) -> None:
        """Take note of runs that an earlier call has settled."""
        for run in runs:
            self.known(run)
        if self._ended:
            self.console.print(f"{len(self._ended)} of {self._total} runs are there already", highlight=False)

    def known(self, run: Run) -> None:
        """Take note of one run that an earlier call has settled."""
        self._ended[run.name] = _outcome(run)

    def started(self, run: Run) -> None:
        """Show a run that has begun, or goes on."""
        self._running[run.name] = run

    def ended(self, run: Run, failed: str = "", seconds: float = 0.0) -> None:
        """Tell that a run has ended; `failed` says why it did so early."""
        self._running.pop(run.name, None)
        if run.is_warm_start:
            outcome = failed or "ready"
        else:
            self._fresh += 1
            self._ended[run.name] = outcome = failed or _outcome(run)
        line = f"{f'[{len(self._ended)}/{self._total}]':>9} {run.name}: {outcome} ({seconds:.0f} s)"
        self.console.print(line, highlight=False, style="yellow" if failed else None)

    def paused(self, run: Run) -> None:
        """Show a run no more that was stopped before its end."""
        self._running.pop(run.name, None)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("variant", "runs", "best rate so far", "accuracy there"):
            table.add_column(name, justify="left" if name == "variant" else "right")
        for variant in self.plan.spec.variants:
            ended = sum(name.startswith(f"{variant.name}, rate ") for name in self._ended)
            many = len(self.plan.search(variant)) + len(self.plan.spec.seeds) - len(self.plan.search_seeds(variant))
            rate, accuracy = self._best(variant.name)
            table.add_row(variant.name, f"{ended}/{many}", rate, accuracy)
        positions = {name: _position(run) for name, run in list(self._running.items())}
        lines = [Text(f"  {name}: {note}", style="dim") for name, (_, note) in positions.items()]
        return Group(table, *lines, Text(self._time(sum(done for done, _ in positions.values()))))

    def _best(self, variant: str) -> tuple[str, str]:
        """Return rate and accuracy of the best runs so far, whatever their seeds: to look at, not a result."""
        by_rate: dict[str, list[float]] = {}
        for name, outcome in self._ended.items():
            owner, rate, _ = name.rsplit(", ", 2)
            if owner == variant and outcome.startswith("accuracy "):
                by_rate.setdefault(rate.removeprefix("rate "), []).append(float(outcome.split()[1]))
        if not by_rate:
            return "", ""
        means = {rate: sum(values) / len(values) for rate, values in by_rate.items()}
        best = max(means, key=means.__getitem__)
        return best, f"{means[best]:.3f}"

    def _time(self, part: float) -> str:
        """Return the time spent and left; the runs in progress are worth `part` runs."""
        spent = time.monotonic() - self._begun
        done, left = self._fresh + part, self._total - len(self._ended) - part
        rest = f", about {_minutes(left * spent / done)} left" if done > 0.2 else ""
        return f"{len(self._ended)}/{self._total} runs, {_minutes(spent)}{rest}"


def _outcome(run: Run) -> str:
    failure = run.failure()
    if failure is not None:
        return f"{failure[0]}: {failure[1]}"
    final = run.final_accuracy()
    return "no held-out accuracy" if final is None else f"accuracy {final:.3f}"


def _position(run: Run) -> tuple[float, str]:
    """Return the share of its steps that a run has done, and what to say of it."""
    row, steps = run.last_row(), run.config.run.steps
    if row is None:
        return 0.0, "warm start" if run.config.warm_start.begins else "starting"
    reward = "" if row.get("reward") is None else f", reward {row['reward']:.3f}"
    return row["step"] / max(1, steps), f"step {row['step']}/{steps}{reward}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
