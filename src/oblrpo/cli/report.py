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
    Several runs are laid over one another.

    Examples: `oblrpo report runs/demo`; `oblrpo report runs/demo --follow`, while it trains in another terminal;
    `oblrpo report runs/demo runs/grpo`.
    """

    runs: Annotated[tuple[str, ...], Positional("RUN ...", "the folder of a run, or of several")] = ()
    """Folders of runs, or `output_dir` of TRL runs."""
    output: str = ""
    """File to write. Empty: RUN/report.html, or of several runs report.html in the folder that holds the first."""
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
    from oblrpo.report.several import write_together
    from oblrpo.runs import check_writable
    from oblrpo.runs.logs import state_files

    runs = list(map(Path, command.runs))
    folder, several = runs[0], len(runs) > 1
    output = Path(command.output or (folder.absolute().parent if several else folder) / "report.html")
    for run in runs:
        check_folder(run)
    check_writable(output)
    if several:
        if command.follow:
            raise InputError(f"--follow takes one run, not {len(runs)}; leave it out, or name one.")
        print(seen(str(write_together(runs, output))))
        return
    if command.follow and state_files(folder):
        raise InputError(f"{folder} is a TRL run, whose log is written with checkpoints only; leave out --follow.")
    if not command.follow:
        print(seen(str(write_report(folder, output))))
    elif page := follow(folder, output, command.seconds, lambda line: print(seen(line), flush=True)):
        print(seen(str(page)))
