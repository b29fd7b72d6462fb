"""Help: the settings of a command; of `oblrpo train` in brief those that most runs set, and the recipes."""

import ast
import inspect
import re
import textwrap
import typing
from argparse import ArgumentParser
from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any, Literal

from oblrpo.cli.flags import positional_of
from oblrpo.settings import RECIPES
from oblrpo.settings.typed import sections, types_of

COMMON = (
    "model", "data", "task", "rewards", "output", "steps", "seed", "prompts_per_step", "num_generations",
    "max_completion_length", "tokens_per_micro_batch", "lora", "algorithm", "learning_rate", "eval_steps",
    "report_to", "resume", "dry_run",
)  # fmt: skip
"""What most runs set."""


def print_settings(command: Any, prog: str, common: Collection[str] = ()) -> None:
    """Print usage, what the command does, and its settings: all, or in brief those of `common`, and the recipes."""
    texts, (first, word) = documented(command), positional_of(command)
    does, _, more = inspect.cleandoc(command.__doc__).partition("\n\n")
    usage = " ".join(filter(None, [prog, word.name, "[--setting VALUE ...]"]))
    parser = ArgumentParser(usage=usage, description=does, epilog=more, add_help=False)
    for section in sections(command):
        types = {name: kind for name, (kind, _) in types_of(section.__class__).items() if not is_dataclass(kind)}
        title, _, more = " ".join(section.__doc__.split()).partition(". ")
        own = common or section is command
        group = parser if own else parser.add_argument_group(title.removesuffix("."), more or None)
        for name in [name for name in types if not common or name in (first, *common)]:
            text = _clause(texts[name], ".;") + "." if common else texts[name]
            default = getattr(section, name)
            text += "" if default is False or default in (None, "", (), {}) else f" [{default}]"
            if name == first:
                _add(parser, word.name, text)
            elif bool in (types[name], *typing.get_args(types[name])):
                _add(group, f"--[no-]{name}", text, "")
            else:
                _add(group, f"--{name}", text, _metavar(types[name]))
    if common:
        _add(parser, "--help-all", "Print all settings, in full.", "")
        group = parser.add_argument_group("recipes")
        for name in sorted(file.name for file in RECIPES.iterdir() if file.name.endswith(".yaml")):
            lines = (RECIPES / name).read_text(encoding="utf-8").splitlines()
            comment = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
            _add(group, name.removesuffix(".yaml"), _clause(comment, ".:;"))
    parser.print_help()


def documented(part: Any) -> dict[str, str]:
    """Every setting of a dataclass with its docstring, which stands under it; of its sections, too."""
    sentences: dict[str, str] = {}
    for kind in [kind for section in sections(part) for kind in type(section).__mro__ if is_dataclass(kind)]:
        [written] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(written, ast.ClassDef)
        for field, text in zip(written.body, written.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                sentences[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return sentences


def _add(group: Any, name: str, text: str, metavar: str | None = None) -> None:
    """Add a row to a group of `argparse`, which shows it."""
    group.add_argument(name.replace("_", "-"), help=text.replace("%", "%%"), metavar=metavar)


def _metavar(kind: Any) -> str:
    """Return what stands for the value of a setting."""
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    kinds = [typing.get_origin(each) or each for each in (kind, *typing.get_args(kind))]
    name = next((name for each, name in ((dict, "YAML"), (int, "INT"), (float, "FLOAT")) if each in kinds), "TEXT")
    return f"{name} ..." if tuple in kinds else name


def _clause(text: str, ends: str) -> str:
    """Return a text up to the end of its first clause."""
    return re.split(rf"[{ends}](?:\s|$)", text, maxsplit=1)[0]
