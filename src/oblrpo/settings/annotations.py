"""The constraints on a setting beside its type and default, declared as annotations where it stands (`train`).

steps: Annotated[int, Range(0), MAY_CHANGE] = 100
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oblrpo.errors import InputError

Mapping = dict[str, Any]
"""Further arguments by name; on the command line one word of YAML, such as '{momentum: 0.9}'."""


class Positional(NamedTuple):
    """The setting is what the first word of a command says that is no flag."""

    name: str  # as usage shows it
    needed: str = ""  # what to give, where the command does nothing without it


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be; NaN and the infinities are in no range."""

    least: float
    most: float = sys.float_info.max


MAY_CHANGE = "may change"
"""A run may be resumed with another value of the setting."""
ADJUSTABLE = "adjustable"
"""The setting is adjusted to rows and model where nobody has set it; `trainer.adjusting` says how."""


@dataclass(frozen=True)
class Idle:
    """The setting does nothing under some configs; a run refuses it there where somebody has set it."""

    why: str
    """The reason, in words; `{task}` stands for the task's name."""
    when: Callable[[Any], bool]
    """Whether it is so under a `TrainConfig`."""


@dataclass(frozen=True)
class Holds:
    """The setting is a mapping whose keys are the fields of a dataclass, with their types, defaults and annotations."""

    kind: type


def annotations_of(config: Any) -> dict[str, tuple[Any, ...]]:
    """The annotations of every setting by its name, of a config and its sections; of the keys that one holds, too."""
    found: dict[str, tuple[Any, ...]] = {}
    for part in filter(dataclasses.is_dataclass, [config, *vars(config).values()]):
        hints = typing.get_type_hints(type(part), include_extras=True)
        found |= {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    for name, notes in list(found.items()):
        for kind in (note.kind for note in notes if isinstance(note, Holds)):
            hints = typing.get_type_hints(kind, include_extras=True)
            found |= {f"{name}.{key}": getattr(hint, "__metadata__", ()) for key, hint in hints.items()}
    return found


def check_ranges(config: Any, values: abc.Mapping[str, Any]) -> None:
    """Refuse numbers out of range; `values` are all settings of a config by name."""
    for name, notes in annotations_of(config).items():
        for note in notes:
            if isinstance(note, Range) and values[name] is not None and not note.least <= values[name] <= note.most:
                most = f" and at most {note.most:g}" if note.most < sys.float_info.max else ""
                least = f"{name} is {values[name]}; it must be a finite number of at least {note.least:g}"
                raise InputError(f"{least}{most}.")


def refuse_idle(given: abc.Mapping[str, str], config: Any) -> None:
    """Refuse what somebody has set, `given` with how it is written there, and a run of `config` would pass over."""
    idle: dict[str, list[str]] = {}
    known = annotations_of(config)
    # Who has set a mapping has set the keys in it.
    parts = [part for part in vars(config).values() if dataclasses.is_dataclass(part)]
    given = dict(given) | {
        f"{name}.{key}": f"{key} in {given[name]}"
        for part in parts
        for name, value in vars(part).items()
        if name in given and any(isinstance(note, Holds) for note in known[name])
        for key in value
    }
    for name, notes in known.items():
        for note in notes:
            if isinstance(note, Idle) and note.when(config):
                idle.setdefault(note.why.format(task=config.task.task), []).append(name)
    refuse_named(given, idle)


def refuse_named(given: abc.Mapping[str, str], idle: abc.Mapping[str, Sequence[str]]) -> None:
    """Refuse settings that do nothing, by why (`idle`), where somebody has set one."""
    for why, names in idle.items():
        if written := [given[name] for name in names if name in given]:
            raise InputError(f"{', '.join(written)} {'has' if len(written) == 1 else 'have'} no effect because {why}; remove {'it' if len(written) == 1 else 'them'}.")


def adjustable(config: Any) -> set[str]:
    """The settings that may be adjusted because nobody has set them."""
    return {name for name, notes in annotations_of(config).items() if ADJUSTABLE in notes} - set(config.given)


def may_change_on_resume(config: Any) -> set[str]:
    """The settings with which a run may be resumed although they differ from those it was started with."""
    return {name for name, notes in annotations_of(config).items() if MAY_CHANGE in notes}
