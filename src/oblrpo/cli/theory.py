"""`oblrpo theory`: every theorem, claimed against computed."""

from __future__ import annotations

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
    """The page."""
    threads: int = 1
    """CPU threads."""


def run(argv: list[str]) -> None:
    """`oblrpo theory`.

    Raises:
        InputError: the page cannot be written.
    """
    command = tyro.cli(TheoryCommand, args=argv, prog="oblrpo theory")
    output = Path(command.output)
    if command.threads < 1:
        raise InputError(f"threads is {command.threads}; it must be at least 1.")
    if output.is_dir() or not output.parent.is_dir():
        raise InputError(f"cannot write the page to {output}; give a file in a folder that is there.")
    import torch

    from oblrpo.theory import run_all
    from oblrpo.theory.page import print_table, write_page

    torch.set_num_threads(command.threads)
    started = time.perf_counter()
    progress = Console(stderr=True, markup=False, highlight=False)
    findings = run_all(lambda text: progress.print(f"{time.perf_counter() - started:5.1f} s  {text}"))
    seconds = time.perf_counter() - started
    print_table(findings.claims, Console(markup=False, highlight=False))
    write_page(findings, output, seconds)
    held = sum(claim.holds for claim in findings.claims)
    count = len(findings.claims)
    print(f"\n{count} statements, {held} hold, {count - held} do not; {seconds:.0f} s; {output}")
