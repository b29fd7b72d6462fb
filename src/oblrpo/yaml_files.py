"""YAML settings, read safely and written alike everywhere."""

from __future__ import annotations

import re
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from oblrpo.errors import InputError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with rules of YAML 1.2: 3e-4 is a number, `off` (a schedule of ours) a word, a key unique."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands there twice.

        Raises:
            ValueError: names it and its line.
        """
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ValueError(f"the key {key.value!r} in line {key.start_mark.line + 1} stands there twice")
            seen.add(getattr(key, "value", None) if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping.

    Raises:
        InputError: the text is something else.
    """
    try:
        settings = yaml.load(text, _Loader) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(settings, dict):
        raise InputError(f"{source} must hold `key: value` settings.")
    return settings


def read_yaml_file(path: Path | Traversable) -> dict[str, Any]:
    """The YAML mapping in a file.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as text ({' '.join(str(error).split())}).") from None
    return read_yaml(text, str(path))


def yaml_text(value: Any, short_lists: bool = False) -> str:
    """Settings as YAML, one a line in their own order; with `short_lists`, plain lists on one line."""
    flow = None if short_lists else False
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    return text


def yaml_line(value: Any) -> str:
    """A value as one line of YAML, with keys in order, as somebody writes it on the command line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
