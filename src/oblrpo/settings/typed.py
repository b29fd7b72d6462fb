"""Settings as fields of dataclasses: those of a config and of its sections, and values as their types want them."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from oblrpo.errors import InputError, did_you_mean

Config = TypeVar("Config")


class Setting(NamedTuple):
    """A setting as it stands in a config."""

    name: str
    value: Any
    type: Any
    notes: tuple[Any, ...]
    """Its annotations."""


def sections(config: Any) -> Iterator[Any]:
    """A dataclass and those in it."""
    yield config
    for value in filter(dataclasses.is_dataclass, vars(config).values()):
        yield from sections(value)


@functools.cache
def types_of(kind: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name -> type and annotations of the fields of a dataclass, sections included."""
    types, hints = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind) if field.compare]
    return {name: (types[name], getattr(hints[name], "__metadata__", ())) for name in names}


def settings_of(config: Any) -> Iterator[Setting]:
    """Every setting of a config and of its sections; a field with `compare` off is none."""
    for section in sections(config):
        for name, type_and_notes in types_of(section.__class__).items():
            if not dataclasses.is_dataclass(value := getattr(section, name)):
                yield Setting(name, value, *type_and_notes)


def with_fields(config: Config, settings: Mapping[str, Any], source: str) -> Config:
    """A config with those of the flat settings replaced that are its own; `source` says where they stand."""
    types = {each.name: each.type for each in settings_of(config)}
    typed = {key: as_type(value, types[key], f"{source}: {key}") for key, value in settings.items() if key in types}
    return replaced(config, typed)


def replaced(config: Config, values: Mapping[str, Any]) -> Config:
    """A config with these settings replaced, in its sections, too."""
    own = {name: values[name] for name in values.keys() & vars(config).keys()}
    inner = {name: replaced(part, values) for name, part in vars(config).items() if dataclasses.is_dataclass(part)}
    return dataclasses.replace(config, **(own | inner))  # type: ignore[type-var]  # `task` is a section and a setting


def of_mapping(kind: type[Config], given: Mapping[str, Any], source: str) -> Config:
    """A dataclass from a mapping, which may leave fields out."""
    known = list(types_of(kind))  # type: ignore[arg-type]  # as above
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
