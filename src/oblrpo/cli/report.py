"""`oblrpo report`: the page of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from oblrpo.cli.flags import parse
from oblrpo.errors import InputError, check_folder
from oblrpo.settings import Positional


@dataclass(frozen=True)
class ReportCommand:
    """Write one HTML page of a run from its metrics and completions: curves with intervals, samples, warnings.

    For a TRL run, the page shows what the log contains, and says what is missing.

    Examples: `oblrpo report runs/demo`; `oblrpo report runs/demo --follow`, while it trains in another terminal.
    """

    run: Annotated[str, Positional("RUN", "the folder of a run")] = ""
    """Folder of a run, or `output_dir` of a TRL run."""
    output: str = ""
    """File to write. Empty: RUN/report.html."""
    follow: bool = False
    """Rewrite the page whenever the run has advanced, until its last step or Ctrl-C; a browser reloads it."""
    seconds: int = 10
    """Seconds between updates of the page with --follow."""


def run(argv: list[str]) -> None:
    """Run `oblrpo report`."""
    command = parse(ReportCommand(), argv, "oblrpo report")
    if command.seconds < 1:
        raise InputError(f"seconds is {command.seconds}; it must be at least 1.")
    from oblrpo.report.html import seen
    from oblrpo.report.page import follow, write_report
    from oblrpo.runs import check_writable
    from oblrpo.runs.logs import state_files

    folder = Path(command.run)
    output = Path(command.output) if command.output else folder / "report.html"
    check_folder(folder)
    check_writable(output)
    if command.follow and state_files(folder):
        raise InputError(f"{folder} is a TRL run, whose log is written with checkpoints only; leave out --follow.")
    if not command.follow:
        print(seen(str(write_report(folder, output))))
    elif page := follow(folder, output, command.seconds, lambda line: print(seen(line), flush=True)):
        print(seen(str(page)))
