"""Requirements on another library: its version, and the settings of its trainer, each with its reason and its fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import not_
from typing import Any, NamedTuple

from oblrpo.errors import InputError

off = not_
"""The requirement that a setting is empty, 0 or False, whichever of them its type has."""


def check_version(library: str, version: str, least: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Refuse a version of a library whose insides are not known here.

    Raises:
        ImportError: it is older than `least`, or not older than `below`.
    """
    if not least <= tuple(map(int, re.findall(r"\d+", version)[:3])) < below:
        known = "{}>={},<{}".format(library, *(".".join(map(str, bound)) for bound in (least, below)))
        raise ImportError(
            f"oblrpo's {library} adapter works with {known}, and this is {library} {version}; install '{known}', or a "
            "version of oblrpo that supports this one."
        )


class Rule(NamedTuple):
    """A requirement on one setting."""

    key: str
    allowed: tuple[Any, ...] | Callable[[Any], bool]
    """The values that it may have, the one to set first; or whether it may have a value."""
    why: str
    fix: str = ""
    """What to set, where that is not the first value."""

    def holds(self, value: Any) -> bool:
        """Whether the setting may have this value."""
        return self.allowed(value) if callable(self.allowed) else value in self.allowed


def check(
    rules: Iterable[Rule],
    trainer: str,
    value_of: Callable[[str], Any],
    shown: Callable[[Any], str] = str,
    further: Iterable[str] = (),
) -> None:
    """Refuse all settings that do not meet their requirement at once, each with its reason and its fix.

    Args:
        rules: the requirements.
        trainer: the name of ours, which does not work with such a setting.
        value_of: the value of a setting, by its key.
        shown: how a value is written.
        further: refusals of what takes more than one setting, as "what: why; fix."
    """
    refusals = []
    for rule in rules:
        if not rule.holds(value := value_of(rule.key)):
            fix = rule.fix or (f"{rule.key}={shown(rule.allowed[0])}" if isinstance(rule.allowed, tuple) else "")
            refusals.append(f"{rule.key}={shown(value)}: {rule.why}; set {fix}.")
    refusals += further
    if len(refusals) == 1:
        raise InputError(f"{trainer} does not work with {refusals[0]}")
    if refusals:
        raise InputError("\n- ".join([f"{trainer} does not work with {len(refusals)} settings:", *refusals]))
