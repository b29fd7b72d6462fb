"""`oblrpo compare`: variants x learning rates x seeds, side by side, on one page."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from oblrpo.cli.flags import parse
from oblrpo.errors import InputError
from oblrpo.report.html import seen
from oblrpo.settings import Mapping, Positional, yaml_text


@dataclass(frozen=True)
class CompareCommand:
    """Train every variant of a comparison at its learning rates and seeds, in parallel, and write one page about it.

    Finished runs are not repeated: the same command resumes after an interruption. Examples: `oblrpo compare
    against-rloo --output runs/rloo`; `oblrpo compare my.yaml --dry-run`; `oblrpo compare fixed-rates --seeds 5 --set
    '{steps: 60}'`.
    """

    spec: Annotated[str, Positional("NAME|FILE", "a built-in comparison or a YAML file")] = ""
    """A built-in comparison (against-rloo, fixed-rates, uniform-or-weighted) or a YAML file (docs/compare.md)."""
    output: str = ""
    """Folder for runs, page and table. Empty: runs/ and the comparison's name."""
    set: tuple[Mapping, ...] = ()
    """Train settings that override the comparison's base for all variants, such as '{task: arithmetic, steps: 60}'."""
    base: str = ""
    """A recipe or YAML file that replaces the comparison's base."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates for every variant that does not set its own."""
    seeds: int = 0
    """Number of seeds, from 0 on. 0: the comparison's."""
    search_seeds: int = -1
    """Number of seeds that choose each variant's rate, which then runs on all seeds. 0: every rate runs on every seed.
    -1: the comparison's."""
    target: Mapping = field(default_factory=dict)
    """Keys that override the comparison's target, such as '{of_gain: 0.8}'; with --only-report, for existing runs."""
    processes: int = 0
    """Number of runs at a time. 0: the comparison's, otherwise one per CPU core, or one if a `model` is loaded."""
    dry_run: bool = False
    """Check everything, print the resolved comparison and its runs; write nothing."""
    only_report: bool = False
    """Write page and table from the existing runs; train nothing."""


def run(argv: list[str]) -> None:
    """Run `oblrpo compare`."""
    command = parse(CompareCommand(), argv, "oblrpo compare")
    from oblrpo.compare.conductor import Conductor
    from oblrpo.compare.plan import Plan
    from oblrpo.compare.spec import read_spec

    if command.dry_run and command.only_report:
        raise InputError("--dry-run writes nothing and --only-report writes the page; give only one of them.")
    settings: dict[str, Any] = {key: value for mapping in command.set for key, value in mapping.items()}
    if command.seeds < 0 or command.processes < 0 or command.search_seeds < -1:
        raise InputError("--seeds, --search-seeds and --processes must not be negative.")
    flags = {
        "base": command.base, "learning_rates": list(command.learning_rates), "seeds": command.seeds,
        "target": command.target, "processes": command.processes,
    }  # fmt: skip
    chosen = {"search_seeds": command.search_seeds} if command.search_seeds >= 0 else {}
    spec = read_spec(command.spec, {key: value for key, value in flags.items() if value} | chosen, settings)
    output = Path(command.output or f"runs/{Path(command.spec).stem}")
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; give a folder as --output.")
    plan = Plan(spec, output)
    if command.dry_run:
        _describe(plan)
        return
    from oblrpo.compare.summary import summarise
    from oblrpo.compare.table import print_table, write_page, write_table

    console = Console(soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else 100)
    conductor = Conductor(plan, console)
    if not command.only_report:
        conductor.run()
    summary = summarise(plan)
    print_table(summary, console)
    table = write_table(summary, plan.output)
    page = write_page(summary, plan.output)
    console.print(f"\n{seen(f'{page} and {table}')}", highlight=False)
    if failed := [reason for reason in conductor.ended.values() if reason]:
        raise InputError(f"{len(failed)} of {plan.count()} runs failed; the same command tries them again. {failed[0]}")


def _describe(plan: Any) -> None:
    from oblrpo.compare.training import check

    check(plan)
    print(seen(yaml_text(plan.spec.as_mapping(), short_lists=True)))
    print(f"{plan.count()} runs, {plan.processes()} at a time")
    for variant in plan.spec.variants:
        for planned in plan.search(variant):
            print(f"  {planned.name}: {seen(planned.place)}")
        if rest := len(plan.spec.seeds) - len(plan.search_seeds(variant)):
            print(f"  {variant.name}, the best of these rates, {rest} further seed{'s' if rest > 1 else ''}")
