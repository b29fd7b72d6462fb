"""Conditions on the settings of somebody else's trainer, each with its reason and its cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A condition on one setting."""

    key: str
    holds: Callable[[Any], bool]
    why: str
    mend: str


def off(value: Any) -> bool:
    """Whether a setting is empty, 0 or False."""
    return not value


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    """The condition that a setting is one of these."""
    return lambda value: value in values
