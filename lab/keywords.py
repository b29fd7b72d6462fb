"""Write `keywords.py`, by which editors complete settings: `python -m lab.keywords`."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal

from oblrpo.settings import RewardsConfig, SamplingConfig, TrainConfig, keywords
from oblrpo.settings.typed import settings_of

HEAD = '''"""Keywords of `oblrpo.train` and `oblrpo.evaluate`, written by `python -m lab.keywords`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypedDict
'''
FILE = Path(keywords.__file__)
ARGUMENTS = {"recipe", "model", "data", "eval_data", "sft_data", "environment", "tools"}
"""Settings that are arguments of their own, which take objects, too."""
PATHS = {"output"}
"""Settings that may be a path of `pathlib`."""


def written() -> str:
    """Return what the file holds."""
    train, evaluate = _keywords(TrainConfig()), _keywords(SamplingConfig()) | _keywords(RewardsConfig())
    shared = {name: kind for name, kind in train.items() if evaluate.get(name) == kind}
    classes = {
        "SharedKeywords(TypedDict, total=False)": ("Settings that both have.", shared),
        "TrainKeywords(SharedKeywords, total=False)": ("Every setting of `oblrpo train`.", train),
        "EvaluateKeywords(SharedKeywords, total=False)": (
            "Every setting of `oblrpo evaluate` without a benchmark.",
            evaluate,
        ),
    }
    text = HEAD
    for kind, (summary, words) in classes.items():
        own = words if words is shared else {name: words[name] for name in words if name not in shared}
        text += f'\n\nclass {kind}:\n    """{summary}"""\n\n'
        text += "".join(f"    {name}: {word}\n" for name, word in own.items())
    return text


def _keywords(config: Any) -> dict[str, str]:
    """Return the type of every setting, as it is written."""
    settings = [setting for setting in settings_of(config) if setting.name not in ARGUMENTS]
    return {each.name: _word(each.type) + " | PathLike[str]" * (each.name in PATHS) for each in settings}


def _word(hint: Any) -> str:
    """Return a type as it is written."""
    if typing.get_origin(hint) is Literal:
        return "Literal[" + ", ".join(f'"{each}"' for each in typing.get_args(hint)) + "]"
    if typing.get_origin(hint) is tuple:
        return "str | Sequence[str]"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
