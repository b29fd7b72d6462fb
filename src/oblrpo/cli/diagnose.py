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
    """Say what is wrong with a run: since which step, how certain that is, and what to do; the worst comes first.

    The exit code is 0 if nothing is wrong, 1 if something is, and 2 if the input cannot be read.

    Examples: `oblrpo diagnose runs/demo`; `oblrpo diagnose runs/demo --look`; `oblrpo diagnose outputs/grpo`, a TRL
    folder; `oblrpo diagnose train.log`; `oblrpo diagnose wandb`; `zcat log.gz | oblrpo diagnose -`.
    """

    run: Annotated[str, Positional("RUN|LOG", "the folder of a run, or a log")] = ""
    """Folder of a run (ours or TRL's), or of W&B, TensorBoard or trackio (its newest run); or a file: one of theirs, a
    trainer's printed or written log, JSON, or a table. It may be compressed (.gz), or a pipe; "-" is standard input."""
    look: bool = False
    """Also measure what logs cannot show, at the newest checkpoint: gradient noise, batch size, baselines."""
    prompts: int = 0
    """Prompts in a batch that --look samples. 0: as many as in a step of the run, at least 32."""
    json: bool = False
    """Print one JSON object instead of text."""


def run(argv: list[str]) -> None:
    """Run `oblrpo diagnose`."""
    command = parse(DiagnoseCommand(), argv, "oblrpo diagnose")
    from oblrpo.diagnosis import diagnose
    from oblrpo.report import html

    if command.prompts and not command.look:
        raise InputError("--prompts has no effect without --look; add --look or remove it.")
    diagnosis = diagnose(command.run)
    found = diagnosis.plain()
    if not command.json:
        print(html.seen(str(diagnosis)))
    if command.look and not (Path(command.run) / "config.yaml").is_file():  # what its log says stands all the same
        words = f"No look: {command.run} is not a run of oblrpo train, so its prompts and rewards are unknown. In "
        words += "a TRL trainer, add a VarianceLedgerCallback (docs/trl.md)."
        found["look"] = {"none": words}
        print("" if command.json else f"\n{html.seen(words)}\n", end="")
    elif command.look:
        from transformers.utils import logging

        from oblrpo.trainer.look import look

        logging.disable_progress_bar()
        seen = look(Path(command.run), command.prompts)
        found["look"] = seen.plain()
        if not command.json:
            print(f"\n{html.seen(str(seen))}")
    if command.json:
        print(json.dumps(found))
    if diagnosis.findings:
        raise SystemExit(1)
