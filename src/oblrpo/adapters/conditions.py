"""Requirements on the settings of another library's trainer, each with its reason and its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from oblrpo.errors import InputError


class Rule(NamedTuple):
    """A requirement on one setting."""

    key: str
    holds: Callable[[Any], bool]
    why: str
    fix: str


def off(value: Any) -> bool:
    """Whether a setting is empty, 0 or False."""
    return not value


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    """The requirement that a setting is one of these."""
    return lambda value: value in values


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
    values = [(rule, value_of(rule.key)) for rule in rules]
    refusals = [
        f"{rule.key}={shown(value)}: {rule.why}; set {rule.fix}." for rule, value in values if not rule.holds(value)
    ]
    refusals += further
    if len(refusals) == 1:
        raise InputError(f"{trainer} does not work with {refusals[0]}")
    if refusals:
        raise InputError("\n- ".join([f"{trainer} does not work with {len(refusals)} settings:", *refusals]))
