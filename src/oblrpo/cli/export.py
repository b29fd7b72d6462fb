"""`oblrpo export`: the model of a run, to share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from oblrpo.cli.flags import parse
from oblrpo.errors import check_folder
from oblrpo.settings import Positional


@dataclass(frozen=True)
class ExportCommand:
    """Write the model of a run into a folder to share, with a model card.

    transformers loads the folder as it is, and `hf upload NAME FOLDER` publishes it.

    Examples: `oblrpo export runs/demo`; `oblrpo export runs/lora --merge --output models/mine`.
    """

    run: Annotated[str, Positional("RUN", "the folder of a run")] = ""
    """Folder of a run."""
    output: str = ""
    """Folder to write. Empty: RUN/export."""
    step: int | None = None
    """Step of the checkpoint, such as the one with the highest held-out accuracy. None: the newest."""
    merge: bool = False
    """Merge adapters into the weights of their model, so that the folder holds a complete model."""


def run(argv: list[str]) -> None:
    """Run `oblrpo export`."""
    command = parse(ExportCommand(), argv, "oblrpo export")
    from oblrpo.report.export import export
    from oblrpo.report.html import seen

    check_folder(Path(command.run))
    folder = export(Path(command.run), Path(command.output) if command.output else None, command.step, command.merge)
    print(seen(str(folder)))
    print("README.md is its card. It names no licence: add one that the base model allows.")
