"""The words of a command line become a command: a dataclass of settings, or of sections of them; and help on it."""

import ast
import inspect
import re
import textwrap
import typing
from argparse import SUPPRESS, ArgumentError, ArgumentParser
from collections.abc import Collection
from contextlib import suppress
from dataclasses import is_dataclass
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, Literal, TypeVar

from oblrpo.errors import InputError
from oblrpo.settings import RECIPES, Positional, as_type, flags_in, hint, read_yaml
from oblrpo.settings.typed import replaced, sections, settings_of, types_of

Command = TypeVar("Command")

DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""The hyphen of a flag, and what a word processor makes of it."""

OVERRIDE = r"[+~]*[\w.]+="
"""How verl and others write a setting, as actor.optim.lr=1e-6."""


def parse(default: Command, argv: list[str], prog: str, help: str = "--help") -> Command:
    """Return the command that these words give, over its default; where `help` is one, list all settings and exit."""
    if {"-h", "--help", help} & set(argv):
        print_settings(default, prog)
        raise SystemExit(0)
    types, (first, word) = {each.name: each.type for each in settings_of(default)}, positional_of(default)
    words_of, rest = _read(argv, types)
    unknown = []
    for before, stray in zip(["", *rest], rest, strict=False):
        if not _is_flag(stray) and _is_flag(before):
            continue  # the value of an unknown flag
        free = first and (first not in words_of or typing.get_origin(types[first]) is tuple)
        if free and not _is_flag(stray) and (not re.match(OVERRIDE, stray) or exists(stray)):
            words_of[first] = [*words_of.get(first, []), stray]
        else:
            unknown.append(stray)
    if unknown:
        raise InputError(_unknown(unknown, types, prog, help, word.name))
    written = flags_in(argv)
    values = {name: _value(words, types[name], written.get(name, name)) for name, words in words_of.items()}
    if word.needed and not values.get(first):
        raise InputError(f"give {word.needed}: `{prog} {word.name}`; see `{prog} {help}`.")
    return replaced(default, values)


def positional_of(config: Any) -> tuple[str, Positional]:
    """The setting that is the first word that is not a flag, and its note."""
    notes = ((setting.name, note) for setting in settings_of(config) for note in setting.notes)
    return next((each for each in notes if isinstance(each[1], Positional)), ("", Positional("")))


def _read(argv: list[str], types: dict[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words that are the value of each setting, and those that are of none."""
    parser = ArgumentParser(
        prefix_chars=DASHES, add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=SUPPRESS
    )
    alone: dict[str, str] = {}  # a switch without a value -> with it: what comes next may be the RECIPE
    for name, kind in types.items():
        names = dict.fromkeys([name.replace("_", "-"), name])
        how: dict[str, Any] = {"nargs": 1}
        if typing.get_origin(kind) is tuple:
            how = {"nargs": "+", "action": "extend"}
        parser.add_argument(*[f"--{each}" for each in names], dest=name, **how)
        if bool in (kind, *typing.get_args(kind)):
            ways = {"": "true", "no-": "false", "no_": "false"}
            alone |= {f"--{way}{each}": f"--{each}={value}" for each in names for way, value in ways.items()}
    pairs = zip(argv, [*argv[1:], ""], strict=False)
    words = [word if after.lower() in {"true", "false"} else alone.get(word, word) for word, after in pairs]
    try:
        given, rest = parser.parse_known_args(words)
    except ArgumentError as error:
        flag = str(error.argument_name).partition("/")[0]
        raise InputError(
            f"{flag} has no value; write it after the flag, as in `{flag} VALUE`, or `{flag}=VALUE` where it begins "
            "with a dash."
        ) from None
    return vars(given), rest


def _is_flag(word: str) -> bool:
    """Whether a word is meant as a flag: dashes that no number follows; "-" alone is standard input."""
    return word != "-" and bool(re.match(rf"[{DASHES}]+([^\d.]|$)", word))


def _value(words: list[str], kind: Any, flag: str) -> Any:
    """Return words as the value of a setting; `none` is no value, or an empty list."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is tuple:
        return () if words == ["none"] else tuple(_value([word], kinds[0], flag) for word in words)
    [word] = words
    if typing.get_origin(kind) is dict:
        return read_yaml(word, f"{flag} {word}")
    value: Any = word
    if type(None) in kinds and word.lower() in {"none", "null"}:
        value = None
    elif bool in kinds:
        value = {"true": True, "false": False}.get(word.lower(), word)
    elif number := {int, float} & set(kinds):
        with suppress(ValueError):
            value = number.pop()(word)
    return as_type(value, kind, flag)


def _unknown(unknown: list[str], names: Collection[str], prog: str, help: str, word: str) -> str:
    """Return the sentence about words that are unknown, each with what may have been meant."""
    takes = f" `{prog}` takes one {word}." if word else ""
    meant = {stray: _suggestion(stray, names) or ("" if _is_flag(stray) else takes) for stray in unknown}
    if len(meant) == 1:
        return f"unknown argument {unknown[0]!r}; see `{prog} {help}`.{meant[unknown[0]]}"
    lines = "".join(f"\n  {stray}:{words or ' unknown.'}" for stray, words in meant.items())
    return f"unknown arguments; see `{prog} {help}`:{lines}"


def _suggestion(word: str, names: Collection[str]) -> str:
    """Return what may have been meant by a word that sets nothing, as the end of a sentence, or nothing."""
    bare = word.lstrip(f"{DASHES}+~").partition("=")[0].replace("-", "_")
    if any(dash in word[:2] for dash in DASHES[1:]) and bare in names:
        return f" It begins with a typographic dash; type --{bare.replace('_', '-')}."
    if _is_flag(word):
        return hint(bare, names, "--")
    if not word.strip():
        return " It is blank: a line of a script ends in a space, or has a Windows line ending."
    if re.match(OVERRIDE, word):
        return hint(bare, names, "--") or " Settings are written --name VALUE."
    return misplaced(word) if "data" in names else ""


def misplaced(word: str) -> str:
    """Say under which flag a word belongs where a recipe may stand, as the end of a sentence, or nothing."""
    from oblrpo.tables.algorithms import ALGORITHMS
    from oblrpo.tasks import BENCHMARKS, TASKS

    path = Path(word)
    if isfile(f"{RECIPES}/{word}.yaml"):
        return ""
    meant = {
        "Give a data set with --data": path.suffix in {".jsonl", ".csv", ".tsv", ".parquet", ".arrow"},
        "Give a model with --model": path.suffix == ".gguf" or isfile(path / "config.json"),
        "Give an algorithm with --algorithm": word in ALGORITHMS,
        "Give a task with --task": word in {*TASKS, *BENCHMARKS},
    }
    if advice := next((sentence for sentence, fits in meant.items() if fits), ""):
        return f" {advice} {word}."
    if isfile(path / "config.yaml"):
        return (
            f" {word} is the folder of a run: `oblrpo train --resume --output {word}` resumes it, "
            f"`oblrpo train {path / 'config.yaml'} --output FOLDER` starts another with its settings."
        )
    if isdir(path) or ("/" in word and path.suffix not in {".yaml", ".yml"} and not isfile(path)):
        return " Give a model with --model, a data set with --data."
    return ""


COMMON = (
    "model", "chat", "data", "prompt_column", "answer_column", "task", "rewards", "output", "steps", "seed",
    "prompts_per_step", "num_generations", "max_completion_length", "tokens_per_micro_batch", "lora", "algorithm",
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
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    kinds = [typing.get_origin(each) or each for each in (kind, *typing.get_args(kind))]
    name = next((name for each, name in ((dict, "YAML"), (int, "INT"), (float, "FLOAT")) if each in kinds), "TEXT")
    return f"{name} ..." if tuple in kinds else name


def _clause(text: str, ends: str) -> str:
    """Return a text up to the end of its first clause."""
    return re.split(rf"[{ends}](?:\s|$)", text, maxsplit=1)[0]
