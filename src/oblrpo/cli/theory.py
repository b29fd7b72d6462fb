"""`oblrpo theory`: every theorem, claimed against computed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from oblrpo.errors import InputError


@dataclass(frozen=True)
class TheoryCommand:
    """Compute every assumption and theorem of the paper on policies small enough to enumerate, in about a minute.

    Prints what is claimed, what comes out, and the verdict; writes a page with the plots.
    """

    output: str = "theory.html"
    """File of the page with the plots."""
    threads: int = 1
    """CPU threads to use."""


def run(argv: list[str]) -> None:
    """Run `oblrpo theory`.

    Raises:
        InputError: the page cannot be written, or this machine has fewer cores than threads are asked for.
    """
    command = tyro.cli(TheoryCommand, args=argv, prog="oblrpo theory")
    output = Path(command.output)
    cores = os.cpu_count() or 1
    if not 1 <= command.threads <= cores:
        raise InputError(
            f"threads is {command.threads}; it must be at least 1 and at most {cores}, this machine's cores."
        )
    import torch

    from oblrpo.research.theory import run_all
    from oblrpo.research.theory.page import print_claims, print_measurements, write_page
    from oblrpo.runs import check_writable

    check_writable(output)
    torch.set_num_threads(command.threads)
    started = time.perf_counter()
    progress = Console(stderr=True, markup=False, highlight=False)
    findings = run_all(lambda text: progress.print(f"{time.perf_counter() - started:5.1f} s  {text}"))
    seconds = time.perf_counter() - started
    console = Console(markup=False, highlight=False)
    print_claims(findings.claims, console)
    console.print()
    print_measurements(findings.measurements, console)
    write_page(findings, output, seconds)
    verdicts = [claim.verdict for claim in findings.claims]
    count = {verdict: verdicts.count(verdict) for verdict in ("holds", "does not hold", "undecided")}
    print(
        f"\n{len(verdicts)} statements: {count['holds']} hold, {count['does not hold']} do not, "
        f"{count['undecided']} undecided; {seconds:.0f} s; {output}"
    )
