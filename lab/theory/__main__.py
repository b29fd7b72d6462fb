"""`python -m lab.theory`: every theorem, claimed against computed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from oblrpo.cli import run_command
from oblrpo.cli.flags import parse
from oblrpo.errors import InputError


@dataclass(frozen=True)
class TheoryCommand:
    """Compute every assumption and theorem of the paper on policies small enough to enumerate, in about a minute.

    Prints how many statements hold, and each that does not with the reason.
    """

    all: bool = False
    """Print every statement, too, and what was measured without a claim."""
    output: str = ""
    """File for a page with every statement and the plots. Empty: no file is written."""
    threads: int = 1
    """CPU threads to use."""


def run(argv: list[str]) -> None:
    """Run `python -m lab.theory`.

    Raises:
        InputError: the page cannot be written, or this machine has fewer cores than threads are asked for.
    """
    command = parse(TheoryCommand(), argv, "python -m lab.theory")
    cores = os.cpu_count() or 1
    if not 1 <= command.threads <= cores:
        raise InputError(
            f"threads is {command.threads}; it must be at least 1 and at most {cores}, this machine's cores."
        )
    import torch

    from lab.theory import run_all
    from lab.theory.console import print_claims, print_measurements, print_summary
    from lab.theory.page import write_page
    from oblrpo.runs import check_writable

    if command.output:
        check_writable(Path(command.output))
    torch.set_num_threads(command.threads)
    started = time.perf_counter()
    progress = Console(stderr=True, markup=False, highlight=False)
    findings = run_all(lambda text: progress.print(f"{time.perf_counter() - started:5.1f} s  {text}"))
    seconds = time.perf_counter() - started
    console = Console(markup=False, highlight=False)
    if command.all:
        print_claims(findings.claims, console)
        console.print()
        print_measurements(findings.measurements, console)
        console.print()
    print_summary(findings.claims, console)
    failed = sum(not claim.holds for claim in findings.claims)
    print(f"\n{len(findings.claims)} statements, {len(findings.claims) - failed} hold; {seconds:.0f} s.", end=" ")
    print("`--all` prints each; `--output theory.html` writes a page with the plots.")
    if command.output:
        write_page(findings, Path(command.output), seconds)
        print(f"The page is {command.output}.")


if __name__ == "__main__":
    run_command(run)
