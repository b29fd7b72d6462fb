"""The console of a run: what a person sees while it trains, and at its end."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeGuard

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from oblrpo.diagnosis import Facts, Watch
from oblrpo.diagnosis.next_steps import NextStep
from oblrpo.report.html import seen
from oblrpo.report.record import LAST_STEPS, accuracy, critical_batch, of_last, reward_of
from oblrpo.streams import PLAIN

PLAIN_LINES = 20  # the number of lines that a run prints where the console is no terminal


class Progress:
    """A live bar on a terminal; a line every so often elsewhere (a log file, CI)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = self._warm_steps = 0
        self._measured = ""  # the newest held-out accuracy, and its step

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.refresh()  # a notebook would keep the last step but one
        self._bar.stop()

    def start(
        self,
        description: str,
        steps: int,
        warm_start_steps: int,
        done: int | None,
        measured: tuple[int, float | None] | None = None,
    ) -> None:
        """Say what is about to run; a resumed run has reached step `done`, and `measured` its last (step, accuracy)."""
        self._steps, self._warm_steps = steps, warm_start_steps
        self._measured = f"  held-out {_figure(measured[1])} (step {measured[0]})" if measured else ""
        self.console.print(seen(description), highlight=False)
        self._warm = self._bar.add_task(
            "warm start", total=warm_start_steps, note="", visible=done is None and warm_start_steps > 0
        )
        self._train = self._bar.add_task("training", total=steps, completed=done or 0, note="")

    def warm_start(self, step: int, loss: float) -> None:
        """Show that a step of supervised learning is done."""
        self._bar.update(self._warm, completed=step + 1, note=f"loss {loss:.3f} nats per token")
        every = max(1, self._warm_steps // PLAIN_LINES)
        if not self.console.is_terminal and (step % every == every - 1 or step + 1 == self._warm_steps):
            self.console.print(f"warm start {step + 1}: loss {loss:.3f} nats per token", highlight=False)

    def warn(self, message: str) -> None:
        """Print a warning about something that the user can fix."""
        self.console.print(f"warning: {seen(message)}", style="yellow", highlight=False)

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Show that a step of the run is done."""
        note = heldout = ""
        if measures := "eval/accuracy" in metrics:
            heldout = f"  held-out {_figure(metrics['eval/accuracy'])}"
            self._measured = f"{heldout} (step {step})"
        if step:
            learned = "no gradient, no update"
            if metrics.get("grad_norm") != 0:
                learned = f"{_signal(metrics['n_snr'])}  lr {_rate([metrics])}"
            note = f"  reward {_figure(metrics['reward'])}  {learned}"
        self._bar.update(self._train, completed=step, note=f"{note}{self._measured}".strip())
        due = measures or step % max(1, self._steps // PLAIN_LINES) == 0 or step == self._steps
        if due and not self.console.is_terminal:
            self.console.print(f"step {step}/{self._steps}{note}{heldout}", highlight=False)


def summary(
    rows: list[dict[str, Any]],
    output: str,
    facts: Facts,
    best: int | None = None,
    pairs: Sequence[Mapping[str, Any]] = (),
    do_next: Sequence[NextStep] = (),
    width: int = 100,
) -> str:
    """Sum a run up from its metrics, what `record.before_and_after` and `next_steps` say of it, in lines of `width`.

    `best` is the step of the best checkpoint.
    """
    measured = [row for row in rows if "eval/accuracy" in row]
    steps = [row for row in rows if row.get("reward") is not None]  # None: all completions of the step were masked
    lines = []
    if steps:
        watch = Watch(facts)
        warned = {each.name: each for row in steps for each in watch.observe(row) if each.wrong}
        lines += [f"{each.name}: {each.sentence}" for each in watch.findings if each.condition.updated]
        lines += [f"{each.name}: reported after step {each.found}, not seen since step {each.until}" for each in
                  warned.values() if not each.condition.updated and each.until < watch.course.compared]  # fmt: skip
    if measured:
        ends = f"{_accuracy(measured[0])} -> {_accuracy(measured[-1])}"
        lines.append(f"held-out accuracy {ends}, 95 % intervals over prompts")
        if best is not None and best != measured[-1]["step"]:
            value = next(row["eval/accuracy"] for row in measured if row["step"] == best)
            lines.append(f"best held-out     {_figure(value)}, kept in checkpoints/step_{best}")
    if _is_number(before := rows[0].get("eval/accuracy_before_warm_start") if rows else None):
        lines.append(f"before warm start {before:.3f}, held-out accuracy of the model as it was loaded")
    if steps:
        tail, updates = steps[-LAST_STEPS:], [row for row in steps if row["learning_rate"]][-LAST_STEPS:]
        lines.append(f"reward            {_mean(tail, 'reward'):.3f}, mean of {of_last(len(tail), 'step')}")
        if updates:
            lines.append(f"learning rate     {_rate(updates)}, mean of {of_last(len(updates), 'update')}")
        if critical := critical_batch(tail):
            lines.append(
                f"critical batch    {critical:.0f} prompts, where noise equals signal; a step had {facts.prompts}"
            )
        lines.append(f"time              {_mean(tail, 'step_time'):.2f} s per step{_shares(rows)}")
    lines += in_columns(pairs, width)
    lines += [f"what next         {step}" for step in do_next]
    return "\n".join(
        [*lines, f"everything is in {seen(output)}: metrics.jsonl, completions/, checkpoints/, report.html"]
    )


def in_columns(pairs: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Write prompts, and what was said to each before and after, each with its reward, in columns."""
    if not pairs:
        return []
    rows = [["held-out prompt", "", "before", "", "after"]]
    for pair in pairs:
        row = [pair["prompt"]]
        for said in (pair["before"], pair["after"]):
            row += [reward_of(said), said["completion"]]
        rows.append([" ".join(seen(word).split()) or "(empty)" for word in row])
    columns = list(zip(*rows, strict=True))
    needed = [max(map(cell_len, column)) for column in columns]
    left, widths = width - 2 * (len(columns) - 1), dict[int, int]()
    for place in sorted(range(len(columns)), key=lambda place: (place in (0, 2, 4), needed[place])):
        share = left // (len(columns) - len(widths))  # rewards are written whole, and long texts share what is left
        widths[place] = needed[place] if place in (1, 3) else min(needed[place], max(share, 4))
        left -= widths[place]
    return ["  ".join(_cut(text, widths[place]) for place, text in enumerate(row)).rstrip() for row in rows]


def _cut(text: str, width: int) -> str:
    """Return a text of just this width on a console: both its ends, where it is longer."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    tail = (width - 1) // 2
    return f"{set_cell_size(text, width - 1 - tail)}…{set_cell_size(text[::-1], tail)[::-1]}"


def _signal(n_snr: float | None) -> str:
    """Write the batch's signal-to-noise ratio, and the share of the gradient's squared norm that is signal."""
    if not _is_number(n_snr):
        return "N SNR -"
    return f"N SNR {n_snr:.2f} ({max(n_snr, 0) / (1 + max(n_snr, 0)):.0%} signal)"


def _shares(rows: list[dict[str, Any]]) -> str:
    """Write what the time of all steps went for, the largest part first."""
    spent = Counter[str]()
    for row in rows:
        spent.update({key.removeprefix("time/"): row[key] or 0.0 for key in row if key.startswith("time/")})
    if not (total := sum(spent.values())):
        return ""
    shares = (f"{name.replace('_', ' ')} {seconds / total:.0%}" for name, seconds in spent.most_common())
    return f"; of all the time {', '.join(shares)}"


def _mean(steps: list[dict[str, Any]], key: str) -> float:
    return math.fsum(row[key] for row in steps) / len(steps)


def _rate(steps: list[dict[str, Any]]) -> str:
    """Write the mean rate, and the schedule's factor on it unless it measures the rate, from an arbitrary start."""
    factor = _mean(steps, "lr_factor")
    by = "" if factor == 1 or any("step_kl" in row for row in steps) else f" (x{factor:.2f} by the schedule)"
    return f"{_mean(steps, 'learning_rate'):.1e}{by}"


def _accuracy(row: dict[str, Any]) -> str:
    """Write the held-out accuracy of a step and its interval; there is none where all completions were masked."""
    if not _is_number(row["eval/accuracy"]):
        return f"none (step {row['step']}, all masked)"
    return f"{accuracy(row)} (step {row['step']})"


def _figure(value: float | None) -> str:
    return f"{value:.3f}" if _is_number(value) else "-"


def _is_number(value: float | None) -> TypeGuard[float]:
    """Whether a metric has a value: one that has none is NaN in the process, and null in the file."""
    return value is not None and math.isfinite(value)


class _PipedConsole(Console):
    """A console of a program, which prints on: rich would end it with what a stream cannot write, or without reader."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Write plainly what the stream's encoding does not have, as the command line does."""
        said = [
            each.encode(self.encoding, PLAIN).decode(self.encoding) if isinstance(each, str) else each
            for each in objects
        ]
        super().print(*said, **settings)

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True


class _NotebookConsole(Console):
    """A console of a notebook, which has no cursor to move."""

    def control(self, *control: Control) -> None:
        """Leave it out; it would come as an empty line."""


@contextmanager
def evaluating(
    name: str = "evaluating", console: Console | None = None
) -> Iterator[Callable[[int, int, Sequence[str]], None]]:
    """Yield what shows how many problems are done, of how many, and notes; on stderr where no console is given."""
    console = console or Console(stderr=True, markup=False, emoji=False, soft_wrap=True)
    with console.status(name) if console.is_terminal else nullcontext() as status:

        def show(done: int, total: int, notes: Sequence[str]) -> None:
            for note in notes:
                console.print(seen(note), highlight=False)
            if status is not None:
                status.update(f"{name}: {done} of {total} problems")

        yield show


def console_of_program(progress: bool) -> Console:
    """Return where a Python program shows its progress: a bar in a terminal, and in a notebook with ipywidgets."""
    if not progress:
        return Console(quiet=True, force_terminal=False)
    console = _PipedConsole(soft_wrap=True, markup=False, emoji=False)
    if not console.is_jupyter:
        return console
    if importlib.util.find_spec("ipywidgets"):
        return _NotebookConsole(soft_wrap=True, markup=False, emoji=False, force_terminal=True)
    return Console(soft_wrap=True, markup=False, emoji=False, force_jupyter=False, force_terminal=False)  # plain lines
