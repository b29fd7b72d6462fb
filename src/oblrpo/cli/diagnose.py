"""`oblrpo diagnose`: what is wrong with a run, of whatever trainer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from oblrpo.cli.flags import parse
from oblrpo.errors import InputError
from oblrpo.settings import Positional


@dataclass(frozen=True)
class DiagnoseCommand:
    """Say what is wrong with a run: since which step, how sure that is, and what to do; the worst comes first.

    The exit code is 0 where nothing is wrong, 1 where something is, and 2 for what cannot be read.

    Examples: `oblrpo diagnose runs/demo`; `oblrpo diagnose runs/demo --look`; `oblrpo diagnose outputs/grpo`, a folder
    of TRL's; `oblrpo diagnose train.log`, what a trainer has printed; `oblrpo diagnose metrics.csv`.
    """

    run: Annotated[str, Positional("RUN|LOG", "the folder of a run, or a log")] = ""
    """Folder of a run, ours or TRL's, or a file: what trainers print or write, JSON, or a table: CSV, of a notebook, or
    exported from W&B or TensorBoard."""
    look: bool = False
    """Also measure once what logs cannot say, of one policy, the newest checkpoint's: noise, batch, baselines."""
    prompts: int = 0
    """Prompts of the batch that --look draws. 0: as many as a step of the run has, 32 at least."""
    checkpoints: int = 1
    """Newest checkpoints that --look measures, each a policy of its own; of several also their mean N SNR. There are as
    many as `oblrpo train --save-total-limit` keeps, 2 and the best unless it is set."""
    json: bool = False
    """Print one JSON object instead of text."""


def run(argv: list[str]) -> None:
    """Run `oblrpo diagnose`."""
    command = parse(DiagnoseCommand(), argv, "oblrpo diagnose")
    from oblrpo.diagnosis import diagnose
    from oblrpo.report import html

    if command.prompts and not command.look:
        raise InputError("--prompts has no effect without --look; add --look or remove it.")
    if command.checkpoints != 1 and not command.look:
        raise InputError("--checkpoints has no effect without --look; add --look or remove it.")
    diagnosis = diagnose(command.run)
    found = diagnosis.plain()
    if not command.json:
        print(html.seen(str(diagnosis)))
    if command.look and not (Path(command.run) / "config.yaml").is_file():  # what its log says stands all the same
        words = f"No look: {command.run} is not a run of oblrpo train, so its prompts and rewards are not known. In "
        words += "a TRL trainer add a VarianceLedgerCallback (docs/trl.md)."
        found["look"] = {"none": words}
        print("" if command.json else f"\n{html.seen(words)}\n", end="")
    elif command.look:
        from transformers.utils import logging

        from oblrpo.trainer.look import look

        logging.disable_progress_bar()
        seen = look(Path(command.run), command.prompts, command.checkpoints)
        found["look"] = seen.plain()
        if not command.json:
            print(f"\n{html.seen(str(seen))}")
    if command.json:
        print(json.dumps(found))
    if diagnosis.findings:
        raise SystemExit(1)
