"""Values as the fields of a dataclass want them."""

from __future__ import annotations

import dataclasses
import numbers
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from oblrpo.errors import InputError, did_you_mean

Section = TypeVar("Section")


def with_fields(part: Section, settings: Mapping[str, Any], source: str) -> Section:
    """One section with those of the flat settings replaced that are fields of it; `source` says where they stand."""
    hints = typing.get_type_hints(type(part))
    mine = {key: as_type(value, hints[key], f"{source}: {key}") for key, value in settings.items() if key in hints}
    return dataclasses.replace(part, **mine)  # type: ignore[type-var]  # a dataclass, which TypeVar cannot say


def of_mapping(kind: type[Section], given: Mapping[str, Any], source: str) -> Section:
    """A dataclass from a mapping, which may leave fields out."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # as above
    for key in given:
        if key not in known:
            raise InputError(f"{source} has no {key!r}; there are: {', '.join(known)}.{did_you_mean(str(key), known)}")
    return with_fields(kind(), given, source)


def as_type(value: Any, hint: Any, name: str) -> Any:
    """The value of `name` as the field's type; an int may stand for a float, and null for what is chosen."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise InputError(f"{name} is {value!r}; choose one of: {', '.join(map(str, choices))}.")
        return value
    if type(None) in typing.get_args(hint):  # `float | None`
        if value is None:
            return None
        (hint,) = set(typing.get_args(hint)) - {type(None)}
    kind = typing.get_origin(hint) or hint
    if kind is tuple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise InputError(f"{name} is {value!r}, but it must be text, or a list of texts.")
    if kind is float and not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise InputError(f"{name} is too large a number.") from None
    if kind is int and not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)  # of numpy, too
    if isinstance(value, kind) and kind is not int:
        return value
    wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}
    raise InputError(f"{name} is {value!r}, but it must be {wanted[kind]}.")
