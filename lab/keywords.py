"""Write `keywords.py`, by which editors complete settings: `python -m lab.keywords`."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from oblrpo.settings import keywords
from oblrpo.settings.evaluate import RewardsConfig, SamplingConfig
from oblrpo.settings.train import TrainConfig

HEAD = '''"""Keywords of `oblrpo.train` and `oblrpo.evaluate`, written by `python -m lab.keywords`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypedDict
'''
FILE = Path(keywords.__file__)
ARGUMENTS = {"model", "data", "eval_data", "sft_data"}
"""Settings that are arguments of their own, which take objects, too."""
PATHS = {"output"}
"""Settings that may be a path of `pathlib`."""


def written() -> str:
    """Return what the file holds."""
    sections = [type(part) for part in vars(TrainConfig()).values() if is_dataclass(part)]
    classes = {
        "TrainKeywords": ("Every setting of `oblrpo train`.", sections),
        "EvaluateKeywords": (
            "Every setting of `oblrpo evaluate` without a benchmark.",
            [SamplingConfig, RewardsConfig],
        ),
    }
    text = HEAD
    for kind, (summary, parts) in classes.items():
        text += f'\n\nclass {kind}(TypedDict, total=False):\n    """{summary}"""\n\n'
        for part in parts:
            hints = typing.get_type_hints(part)
            names = [each.name for each in fields(part) if each.name not in ARGUMENTS]
            for name in names:
                text += f"    {name}: {_word(hints[name])}{' | PathLike[str]' if name in PATHS else ''}\n"
    return text


def _word(hint: Any) -> str:
    """Return a type as it is written."""
    if typing.get_origin(hint) is Literal:
        return "Literal[" + ", ".join(f'"{each}"' for each in typing.get_args(hint)) + "]"
    if typing.get_origin(hint) is tuple:
        return "str | Sequence[str]"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
