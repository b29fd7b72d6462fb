"""The page that grows while the parts run: written after every line, so that a killed run keeps what it has."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


class OutOfTime(BaseException):
    """A deadline has passed. No `Exception`, so that nothing that runs takes it for a failure of its own."""


@dataclass
class Table:
    """Lines of one measurement."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)


@dataclass
class Part:
    """One part of the page."""

    title: str
    seconds: float = 0.0
    """What it took."""
    tables: list[Table] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What was skipped, and whatever else there is to say."""
    wrong: list[str] = field(default_factory=list)
    """Checks that failed."""

    @property
    def text(self) -> str:
        """The part as Markdown."""
        lines = ["", f"## {self.title}" + (f" ({self.seconds:.0f} s)" if self.seconds else "")]
        lines += [text for sentence in self.said for text in ("", sentence)]
        for table in self.tables:
            cells = [table.columns, ["---"] * len(table.columns), *table.rows]
            lines += ["", table.title, "", *("| " + " | ".join(row) + " |" for row in cells)]
        lines += [text for sentence in self.wrong for text in ("", f"**Wrong:** {sentence}")]
        return "\n".join(lines) + "\n"


class Page:
    """GPU.md and gpu.json in a folder."""

    def __init__(self, folder: Path, head: dict[str, str]) -> None:
        self.folder, self.head = folder, head
        self.parts: list[Part] = []
        self.deadline = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, title: str) -> None:
        """The next part."""
        self.parts.append(Part(title))
        self.write()

    def table(self, title: str, *columns: str) -> None:
        """Begin a table."""
        self.parts[-1].tables.append(Table(title, columns))

    def add(self, *cells: object) -> None:
        """Put a line under the last table."""
        self.parts[-1].tables[-1].rows.append(tuple(map(str, cells)))
        self.write()

    def say(self, sentence: str) -> None:
        """Put down a sentence."""
        self.parts[-1].said.append(sentence)
        self.write()

    def check(self, fine: bool, sentence: str) -> None:
        """Put down what is wrong unless all is fine."""
        if not fine:
            self.parts[-1].wrong.append(sentence)
            self.write()

    def has_time(self, seconds: float) -> bool:
        """Whether so much is left until the deadline."""
        return time.monotonic() + seconds < self.deadline

    @contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Raise OutOfTime within when the deadline passes (of `time.monotonic`); an outer one that is earlier holds."""
        before = self.deadline, signal.getsignal(signal.SIGALRM)
        outer = signal.getitimer(signal.ITIMER_REAL)[0]
        self.deadline = min(deadline, time.monotonic() + outer) if outer else deadline

        def stop(*_: object) -> None:
            raise OutOfTime

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.deadline - time.monotonic()))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.deadline = before[0]
            signal.signal(signal.SIGALRM, before[1])
            if outer:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.deadline - time.monotonic()))

    @property
    def top(self) -> str:
        """What stands above the parts."""
        return "\n".join(["# On a GPU", "", *(f"- {name}: {value}" for name, value in self.head.items())]) + "\n"

    def write(self) -> None:
        """Both files, each replaced whole."""
        parts = [asdict(part) for part in self.parts]
        self._replace("gpu.json", json.dumps({"head": self.head, "parts": parts}, indent=1) + "\n")
        self._replace("GPU.md", "\n".join([self.top, *(part.text for part in self.parts)]))

    def _replace(self, name: str, text: str) -> None:
        new = self.folder / f".{name}"
        new.write_text(text)
        new.replace(self.folder / name)
