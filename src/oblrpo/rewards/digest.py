"""What a callable is: its source, and the values that it carries, in one digest."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from oblrpo.checksums import sum_of_texts

PLAIN = (type(None), str, bytes, Number, date, time, timedelta, PurePath, range)
"""Types whose values are all that their repr says."""


def digest_and_gaps(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return the SHA-256 of a callable's source, defaults, bound arguments, attributes and what it encloses.

    Beside it stands what of these has no part in it: a source that cannot be had, and what is no plain value.
    """
    unknown: dict[str, None] = {}
    try:
        return sum_of_texts([_described(function, "", unknown, ())]), tuple(unknown)
    except Exception:  # an object of the user's may raise anything
        return "", ("all of it",)


def _described(thing: Any, place: str, unknown: dict[str, None], holders: tuple[int, ...]) -> str:
    """Describe a thing; parts that cannot be described go to `unknown`, by their place."""
    if isinstance(thing, Enum):  # whose repr may hold an address
        thing = [type(thing).__qualname__, thing.name, thing.value]
    if isinstance(thing, int):
        return hex(thing)  # a long one has no repr
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in holders:
        return "itself"
    holders = (*holders, id(thing))

    def described(part: Any, name: object = "") -> str:
        return _described(part, ".".join(filter(None, (place, str(name)))), unknown, holders)

    if isinstance(thing, Mapping):
        return f"{{{', '.join(sorted(f'{described(key)}: {described(value, key)}' for key, value in thing.items()))}}}"
    if isinstance(thing, (list, tuple)):
        return f"[{', '.join(map(described, thing))}]"
    if isinstance(thing, (set, frozenset)):
        return f"({', '.join(sorted(map(described, thing)))})"
    if isinstance(thing, FunctionType):
        defaults, enclosed = {"defaults": thing.__defaults__}, inspect.getclosurevars(thing).nonlocals
        return described([thing.__code__, defaults, thing.__kwdefaults__, enclosed])
    if isinstance(thing, (CodeType, type)):
        if not (source := _source(thing)):
            unknown[f"the source of {place}" if place else "the source"] = None
        return source
    if isinstance(thing, re.Pattern):
        return described([thing.pattern, thing.flags])
    if isinstance(thing, functools.partial):
        return described([thing.func, {"arguments": thing.args}, thing.keywords])
    if isinstance(thing, MethodType):
        return described([thing.__func__, thing.__self__])
    if isinstance(thing, BuiltinFunctionType):
        owner = thing.__self__
        return thing.__qualname__ + (str(owner.__name__) if isinstance(owner, ModuleType) else described(owner))
    if type(thing).__module__ == "functools":  # cache
        return described(thing.__wrapped__)
    if place and not is_dataclass(thing):  # of objects the reward itself is looked into, and data classes
        unknown[f"{place} ({type(thing).__name__})"] = None
        return type(thing).__qualname__
    slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__"]
    values = {name: getattr(thing, name, None) for name in slots} | getattr(thing, "__dict__", {})
    return described(type(thing)) + described(values)


@functools.cache  # the file may be edited during a run
def _source(written: CodeType | type) -> str:
    """Return the source of a function's code, or of a class; none of a lambda, whose source is its entire statement."""
    try:
        return inspect.getsource(written) if getattr(written, "co_name", "") != "<lambda>" else ""
    except (OSError, TypeError):
        return ""
