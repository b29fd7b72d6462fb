"""YAML 1.2 settings, read safely and written alike everywhere."""

from __future__ import annotations

import io
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from oblrpo.errors import InputError

DEEPEST, LARGEST = 50, 100_000
"""How deep a document may be, and how many values it may hold once its aliases are written out."""


class _Constructor(SafeConstructor):
    """YAML's core schema, which has no dates: 2024-01-01 is text, and so is `=`. Keys are text, each there once."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> Any:
        """Refuse a key that is not text, or is there already."""
        if wrong := "is not text; quote it" if not isinstance(key, str) else "appears twice" if key in mapping else "":
            raise ConstructorError(None, None, f"the key {key!r:.40} {wrong}", key_node.start_mark)
        return True


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def _yaml(flow: bool | None = False, sort: bool = False) -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.max_depth, yaml.composer.warn_double_anchors = _Constructor, DEEPEST, False
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = flow, sort, 10**6
    return yaml


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping."""
    place, what = source[:200], "a value does not fit its !! tag"
    try:
        settings = _yaml().load(text) or {}
        _check(settings)
    except Exception as error:  # the library raises KeyError of `!!bool x`, AssertionError of `%YAML 1.3`, and others
        if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
            place += f", line {mark.line + 1}, column {mark.column + 1},"
            what = f"{error.context}, {error.problem}" if error.context else str(error.problem)
        elif isinstance(error, (YAMLError, ValueError, AssertionError)):
            what = str(error)
        reason = " ".join(what.partition(", if necessary")[0].encode("utf-8", "backslashreplace").decode().split())
        raise InputError(f"{place} is not valid YAML: {reason[:500]}.") from None
    if not isinstance(settings, dict):
        raise InputError(f"{source} must hold settings as YAML has them: `key: value`, or {{key: value}} on one line.")
    return settings


def _check(document: Any) -> None:
    """Refuse what settings cannot be, and more values than a file of settings has: aliases may multiply them."""
    left, count = [document], 0
    while left:
        value, count = left.pop(), count + 1
        if count > LARGEST:
            raise ValueError(f"it holds more than {LARGEST:,} values, its aliases written out")
        if type(value) is dict:
            left += [*value, *value.values()]
        elif type(value) is list:
            left += value
        elif isinstance(value, str):
            value.encode()  # half a surrogate pair cannot be written
        elif not isinstance(value, (int, float, type(None))):
            raise ValueError(f"a setting cannot hold a value of type {type(value).__name__}")


def read_yaml_file(path: Path | Traversable) -> dict[str, Any]:
    """The YAML mapping in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as text ({' '.join(str(error).split())}).") from None
    return read_yaml(text, str(path))


def yaml_text(value: Any, short_lists: bool = False) -> str:
    """Settings as YAML, one a line in their own order; with `short_lists`, plain lists on one line."""
    return _dumped(_yaml(flow=None if short_lists else False), value)


def yaml_line(value: Any) -> str:
    """A value as one line of YAML, with keys in order, as it is written on the command line."""
    return _dumped(_yaml(flow=True, sort=True), value).removesuffix("...\n").strip()


def _dumped(yaml: Any, value: Any) -> str:
    yaml.dump(value, text := io.StringIO())
    return text.getvalue()
