"""One class for each library. It is given a step's metrics under their own keys; warnings come as text.

None of them needs the network: TensorBoard and trackio write files, and W&B is told to stay offline unless the
environment says otherwise (WANDB_MODE=online; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from oblrpo.errors import InputError, did_you_mean
from oblrpo.yaml_files import yaml_text

Values = dict[str, float | str]


@dataclass(frozen=True)
class Opening:
    """What a library is told when it is opened."""

    folder: Path
    """The run's folder."""
    name: str
    """The run's name, which stays the same when it is resumed."""
    identity: str
    """The run's identity in the library, which stays the same, too."""
    project: str
    settings: dict[str, Any]
    sent: int
    """The last step that the library was sent before; -1 where it was sent none."""


class Tracker(Protocol):
    """An open run in a library."""

    lacks: int
    """The first step that the library is still to be sent."""

    def log(self, step: int, values: Values) -> None:
        """Take one step's values."""
        ...

    def close(self, failed: bool) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """TensorBoard's event files in RUN/tensorboard, through torch's writer.

    What an interrupted run wrote after the last step noted is struck out (`purge_step`), and written again.
    """

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.lacks = opening.sent + 1
        purge = {"purge_step": self.lacks} if self.lacks else {}
        self._writer: Any = SummaryWriter(str(opening.folder / "tensorboard"), **purge)
        if not purge:
            lines = yaml_text(opening.settings).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines))  # indented: code, in Markdown

    def log(self, step: int, values: Values) -> None:
        """Write scalars, and texts as text; they are on the disk when this returns."""
        for key, value in values.items():
            (self._writer.add_text if isinstance(value, str) else self._writer.add_scalar)(key, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """End the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, its files in RUN/wandb.

    Online the server says what it has. Offline every start of the run makes a folder that holds the whole run, so that
    the newest is all there is to sync.
    """

    def __init__(self, opening: Opening) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb judges it
        self._run: Any = wandb.init(
            dir=str(opening.folder),
            project=opening.project,
            name=opening.name,
            id=opening.identity,
            resume="allow" if mode == "online" else None,
            mode=mode,
            config=opening.settings,
            settings=wandb.Settings(console="off", silent=True),
        )
        self.lacks = self._run.starting_step if self._run.resumed else 0

    def log(self, step: int, values: Values) -> None:
        """Log one step."""
        self._run.log(values, step=step, commit=True)

    def close(self, failed: bool) -> None:
        """Finish the run, as a failed one where it was."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, in its own database on this machine.

    Trackio writes a moment later, so that a kill can cost a step.
    """

    def __init__(self, opening: Opening) -> None:
        import trackio

        self.lacks = opening.sent + 1
        self._run: Any = trackio.init(
            project=opening.project,
            name=opening.name,
            config=opening.settings,
            resume="allow" if self.lacks else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Values) -> None:
        """Log one step."""
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        """Wait until everything is in the database."""
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
"""The classes by the names that TRL uses, which are those of the packages and of our extras, too."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse unknown names, names given twice, and libraries that are not installed.

    Raises:
        InputError: says which, and how to install it.
    """
    for place, name in enumerate(names):
        if name not in TRACKERS:
            raise InputError(
                f"unknown report_to {name!r}; choose of: {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}"
            )
        if name in names[:place]:
            raise InputError(f"report_to names {name} twice; once is enough.")
        if find_spec(name) is None:
            raise InputError(f"report_to {name} needs its library; install it: pip install 'oblrpo[{name}]'")
