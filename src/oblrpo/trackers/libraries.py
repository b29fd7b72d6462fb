"""How each library is opened, logged to and closed. A step's metrics go under their own keys; warnings come as text.

None of them needs the network: TensorBoard and trackio write files, and W&B stays offline unless the
environment says otherwise (WANDB_MODE=online; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, did_you_mean, pip_install
from oblrpo.settings import yaml_text

Rows = list[dict[str, Any]]
Values = dict[str, float | str | Rows]
"""A step's metrics; warnings are text, and completions, if they are sent, the rows of a table."""


@dataclass(frozen=True)
class Opening:
    """What a library is given when it is opened."""

    folder: Path  # the run's folder
    name: str  # the run's name, which stays the same when it is resumed
    identity: str  # the run's identity in the library, which stays the same, too
    project: str
    settings: dict[str, Any]
    sent: int  # the last step that the library was sent before; -1 where it was sent none


@dataclass
class Tracker:
    """An open run in a library."""

    lacks: int  # the first step that the library is still to be sent
    log: Callable[[int, Values], None]  # takes one step's values
    close: Callable[[bool], None]  # writes what is left; its argument says whether the run failed


def tensorboard(opening: Opening) -> Tracker:
    """Event files in RUN/tensorboard, through torch's writer; a step is on the disk when `log` returns.

    What an interrupted run wrote after the last step noted is struck out (`purge_step`), and written again.
    """
    from torch.utils.tensorboard import SummaryWriter

    lacks = opening.sent + 1
    writer: Any = SummaryWriter(str(opening.folder / "tensorboard"), **({"purge_step": lacks} if lacks else {}))
    if not lacks:
        lines = yaml_text(opening.settings).splitlines()
        writer.add_text("config", "\n".join(f"    {line}" for line in lines))  # indented: code, in Markdown

    def log(step: int, values: Values) -> None:
        for key, value in values.items():
            if not isinstance(value, list):  # it has no tables
                (writer.add_text if isinstance(value, str) else writer.add_scalar)(key, value, step)
        writer.flush()

    return Tracker(lacks, log, lambda failed: writer.close())


def wandb(opening: Opening) -> Tracker:
    """A run of Weights & Biases, its files in RUN/wandb, beside one that the program has open, which stays as it is.

    Online the server reports what it has. Offline every start of the run makes a folder with the complete run, so that
    only the newest need be synced.
    """
    import wandb as library

    def table(rows: Rows) -> Any:
        return library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb checks it
    run: Any = library.init(
        dir=str(opening.folder), project=opening.project, name=opening.name, id=opening.identity,
        resume="allow" if mode == "online" else None, mode=mode, config=opening.settings,
        settings=library.Settings(console="off", silent=True, reinit="create_new"),
    )  # fmt: skip
    return Tracker(
        run.starting_step if run.resumed else 0,
        lambda step, values: run.log(_with_tables(values, table), step=step, commit=True),
        lambda failed: run.finish(exit_code=int(failed)),
    )


def trackio(opening: Opening) -> Tracker:
    """A run of trackio, in its own database on this machine; it writes a moment later, so a kill can cost a step."""
    import pandas
    import trackio as library

    lacks = opening.sent + 1
    run: Any = library.init(
        project=opening.project, name=opening.name, config=opening.settings, resume="allow" if lacks else "never",
        embed=False, auto_log_cpu=False, auto_log_gpu=False,
    )  # fmt: skip
    return Tracker(
        lacks,
        lambda step, values: run.log(
            _with_tables(values, lambda rows: library.Table(dataframe=pandas.DataFrame(rows))), step=step
        ),
        lambda failed: run.finish(),
    )


def _with_tables(values: Values, table: Callable[[Rows], Any]) -> dict[str, Any]:
    return {key: table(value) if isinstance(value, list) else value for key, value in values.items()}


TRACKERS: dict[str, Callable[[Opening], Tracker]] = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
"""How each is opened, by the names that TRL uses, which are those of the packages and of our extras, too."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse unknown names, names given twice, and libraries that are not installed."""
    for place, name in enumerate(names):
        if name not in TRACKERS:
            raise InputError(f"unknown report_to {name!r}; known: {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}")
        if name in names[:place]:
            raise InputError(f"report_to names {name} twice; once is enough.")
        if find_spec(name) is None:
            raise InputError(f"report_to {name} needs its library; install it with: {pip_install(name)}")
