"""Flags become a command; one that is unknown is told with what may have been meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import tyro

from oblrpo.errors import InputError
from oblrpo.settings import hint

Command = TypeVar("Command")


def parse(
    kind: type[Command], argv: list[str], default: Command, prog: str, names: Iterable[str], help: str
) -> Command:
    """Return the command that these words give, over its default.

    Args:
        kind: a dataclass.
        argv: the words.
        default: what the words override.
        prog: the command, as it is typed.
        names: all of its settings.
        help: the flag under which they are listed.

    Raises:
        InputError: names a flag that is unknown.
    """
    command, unknown = tyro.cli(
        kind,
        args=argv,
        prog=prog,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        return_unknown_args=True,
    )
    if unknown:
        name = unknown[0].split("=")[0].removeprefix("--").replace("-", "_")
        raise InputError(f"unknown argument {unknown[0]!r}; see `{prog} {help}`.{hint(name, names, '--')}")
    return command
