"""`oblrpo report`: the page of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ReportCommand:
    """Write RUN/report.html from metrics.jsonl and completions/."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run."""


def run(argv: list[str]) -> None:
    """`oblrpo report`."""
    command = tyro.cli(ReportCommand, args=argv, prog="oblrpo report")
    from oblrpo.report import write_report

    print(write_report(Path(command.run)))
