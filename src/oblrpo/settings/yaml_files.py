"""YAML settings, read safely and written alike everywhere."""

from __future__ import annotations

import re
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from oblrpo.errors import InputError

DEEPEST, LARGEST = 50, 100_000
"""How deep a document may be, and how many values it may hold once its aliases are written out."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with rules of YAML 1.2: 3e-4 is a number, `off` (a schedule of ours) a word, a key unique."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # values that a node stands for, by its identity; 0: not complete yet

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value, bounded in depth and in size.

        Raises:
            ValueError: it is too deep or too large, holds itself, or has half a surrogate pair.
        """
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # half a surrogate pair cannot be written
        if node is not None and self._size(node) > LARGEST:
            raise ValueError(f"it holds more than {LARGEST:,} values, its aliases written out")
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in self._sizes:
            if not hasattr(node, "end_mark") or node.end_mark is None:
                raise ValueError("a value holds itself by an alias")
            parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else [pair])]
            self._sizes[id(node)] = 1 + sum(map(self._size, parts))
        return self._sizes[id(node)]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that appears twice.

        Raises:
            ValueError: names it and its line; or a key is no text.
        """
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ValueError(f"the key {key.value!r} in line {key.start_mark.line + 1} appears twice")
            seen.add(getattr(key, "value", None) if isinstance(key, yaml.ScalarNode) else None)
        mapping = super().construct_mapping(node, deep)
        for key in mapping:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r:.40} in line {node.start_mark.line + 1} is not text; quote it")
        return mapping


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


class _Dumper(yaml.SafeDumper):
    """YAML's safe writer, which quotes a word that `_Loader` would take for a number, as 12e34."""


for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping."""
    try:
        settings = yaml.load(text, _Loader) or {}
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # The library raises KeyError of `!!bool x`, AttributeError of `!!timestamp x`.
        what = str(error) if isinstance(error, (yaml.YAMLError, ValueError)) else "a value does not fit its !! tag"
        said = " ".join(what.encode("utf-8", "backslashreplace").decode().split())[:500]
        raise InputError(f"{source[:200]} is not valid YAML: {said}.") from None
    if not isinstance(settings, dict):
        raise InputError(f"{source} must hold settings as YAML has them: `key: value`, or {{key: value}} on one line.")
    return settings


def read_yaml_file(path: Path | Traversable) -> dict[str, Any]:
    """The YAML mapping in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as text ({' '.join(str(error).split())}).") from None
    return read_yaml(text, str(path))


def yaml_text(value: Any, short_lists: bool = False) -> str:
    """Settings as YAML, one a line in their own order; with `short_lists`, plain lists on one line."""
    flow = None if short_lists else False
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    return text


def yaml_line(value: Any) -> str:
    """A value as one line of YAML, with keys in order, as somebody writes it on the command line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
