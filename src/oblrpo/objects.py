"""Objects that a Python program gives instead of names: a model with its tokenizer, rows, reward functions.

In the settings a word stands for each object, such as `python:my_reward`, so that everybody can read `config.yaml`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oblrpo.checksums import sum_of_texts
from oblrpo.errors import InputError
from oblrpo.settings import refuse_named
from oblrpo.settings.shared import split_weight

if TYPE_CHECKING:
    from oblrpo.tasks.sources import Rows

PREFIX = "python:"  # how the word of an object begins
MOST_ROWS = 1_000_000  # rows of an iterable that does not say how many it has; it may have no end
OF_LOADING = ("device", "dtype", "attn_implementation", "trust_remote_code", "load_in_4bit")
"""Settings that say how a model is loaded."""


def plain_name(word: str) -> str:
    """Return a name as people read it: the word `python:500 rows, sha256 298ecd14` stands for 500 rows from Python."""
    return f"{word.removeprefix(PREFIX).partition(', sha256')[0]} from Python" if word.startswith(PREFIX) else word


@dataclass(frozen=True)
class Objects:
    """Objects by the words that stand for them in the settings."""

    model: Any = None  # a loaded model, or None
    tokenizer: Any = None  # the tokenizer of `model`
    rows: Mapping[str, Rows] = field(default_factory=dict)  # rows of `data`, `eval_data` and `sft_data`
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # reward functions
    environments: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # environments and tools

    def check(
        self, model: str = "", data: Iterable[str] = (), rewards: Iterable[str] = (), sft_data: Iterable[str] = (),
        environment: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Refuse words whose objects are not here."""
        present = {*self.rows, *self.functions, *self.environments} | ({model} if self.model is not None else set())
        named = {"model": [model], "data": data, "rewards": rewards, "sft_data": sft_data, "environment": environment}
        for setting, words in named.items():
            for word in words:
                if word.startswith(PREFIX) and not {word, word.split("@")[0]} & present:
                    again = "reward" if setting == "rewards" else setting
                    raise InputError(
                        f"{setting} is {word!r}, an object of the Python program that started the run, which is not "
                        f"kept; give it again from Python ({again}=... of oblrpo.evaluate, or of "
                        "oblrpo.train(..., resume=True)), or name another."
                    )

    def refuse_no_effect(self, given: Mapping[str, Any]) -> None:
        """Refuse settings that have nothing to say beside these objects."""
        why: dict[str, tuple[str, ...]] = {}
        if self.model is not None:
            why["the model is loaded already"] = OF_LOADING
        if given.get("rewards") and {word.split("@")[0] for word in given["rewards"]} <= self.functions.keys():
            why["functions of this program have no time limit"] = ("reward_seconds",)
        refuse_named({name: name for name in given}, why)

    def notes(self) -> list[str]:
        """Return what a user should know of the objects, a line each."""
        notes = []
        if self.model is not None:
            notes.append(f"the {type(self.model).__name__} is trained in place, without dropout")
        if self.functions:
            names = ", ".join(word.removeprefix(PREFIX) for word in self.functions)
            notes.append(f"called in this process, without a time limit: {names}")
        if self.environments:
            names = ", ".join(word.removeprefix(PREFIX) for word in self.environments)
            notes.append(f"lives in this process, where nothing ends a call that hangs: {names}")
        return notes


def split_objects(
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    rewards: Any = None,
    sft_data: Any = None,
    reward_weights: Sequence[float] | None = None,
    environment: Any = None,
    tools: Any = None,
) -> tuple[dict[str, Any], Objects]:
    """Return the settings that these come to, names as they are and words for objects, and the objects.

    `model` may be the pair of a loaded model and its tokenizer, data a name or an iterable of mappings, and rewards a
    name, a callable, or a list of both. The weights stand behind their names, as on the command line. An environment is
    a class, or what returns one, and tools are functions, or names of these.
    """
    settings: dict[str, Any] = {}
    if isinstance(model, (tuple, list)) and len(model) == 2 and tokenizer is None:
        model, tokenizer = model
    if isinstance(model, (str, os.PathLike)):
        if tokenizer is not None:
            raise InputError("a model given by name brings its own tokenizer; leave tokenizer out or load both.")
        settings["model"], model = os.fspath(model), None
    elif model is not None:
        if tokenizer is None:
            raise InputError(f"the loaded model ({type(model).__name__}) needs its tokenizer; give tokenizer=...")
        settings["model"] = PREFIX + type(model).__name__
    elif tokenizer is not None:
        raise InputError("tokenizer belongs to a loaded model; give model=..., too.")
    rows: dict[str, Rows] = {}
    for name, given in (("data", data), ("eval_data", eval_data), ("sft_data", sft_data)):
        if given is not None:
            names = _names(given)
            if not names:
                given_rows = rows_of(given, name)
                digest = sum_of_texts(json.dumps(as_stable_json(row), sort_keys=True) for _, row in given_rows)
                names = (f"{PREFIX}{len(given_rows)} rows, sha256 {digest[:8]}",)
                rows[names[0]] = given_rows
            settings[name] = names
    functions: dict[str, Callable[..., Any]] = {}
    if rewards is not None:
        settings["rewards"] = _rewards(rewards, reward_weights, functions)
    elif reward_weights is not None:
        raise InputError("reward_weights belong to reward; give that, too.")
    environments: dict[str, Callable[..., Any]] = {}
    if environment is not None:
        [settings["environment"]] = _words([environment], "environment", environments)
    if tools is not None:
        settings["tools"] = _words(tools if isinstance(tools, (list, tuple)) else [tools], "tools", environments)
    return settings, Objects(model, tokenizer, rows, functions, environments)


def rows_of(given: Any, name: str) -> Rows:
    """Return all rows of a list, a data set of the library `datasets`, or any other iterable of mappings."""
    if isinstance(given, Mapping):
        example = next(iter(given), "train")
        raise InputError(f"{name} holds several named parts; give one of them, such as {name}={name}[{example!r}].")
    if hasattr(given, "iterrows"):  # a table of pandas
        given = given.to_dict("records")
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:  # an array without a length
        raise InputError(f"{name} is a {type(given).__name__}; give file names, or rows: an iterable of dicts.")
    rows, most = [], max(MOST_ROWS, len(given) if isinstance(given, Sized) else 0)
    for index, row in enumerate(given):
        if index == most:
            raise InputError(
                f"{name} has more than {most:,} rows, and may be endless; give as many as the run needs, "
                f"such as list(itertools.islice({name}, 10_000))."
            )
        row = row.to_dict() if hasattr(row, "to_dict") else row  # of pandas
        if not isinstance(row, Mapping):
            raise InputError(f"{name} row {index} is a {type(row).__name__}, not a dict of columns.")
        if odd := [column for column in row if not isinstance(column, str)]:
            raise InputError(f"{name} row {index} has a column named {odd[0]!r}; names of columns must be text.")
        rows.append((f"{name} row {index}", dict(row)))
    if not rows:
        raise InputError(f"{name} holds no rows.")
    return rows


def _names(given: Any) -> tuple[str, ...]:
    """Return file or hub names; none if `given` is something else."""
    if isinstance(given, (str, os.PathLike)):
        return (os.fspath(given),)
    if isinstance(given, (list, tuple)) and all(isinstance(name, (str, os.PathLike)) for name in given):
        return tuple(os.fspath(name) for name in given)
    return ()


def as_stable_json(value: Any) -> Any:
    """Return a value as JSON knows it, equal in every process: sets are sorted, and addresses in memory left out."""
    if hasattr(value, "tolist"):  # an array, whose repr leaves out the middle
        value = value.tolist()
    if args := getattr(value, "template_args", None):  # of messages
        value = [list(value), args]
    if isinstance(value, int) and abs(value) >= 2**63:  # Python writes no more than 4,300 digits
        return hex(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_stable_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_stable_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(as_stable_json(item), sort_keys=True) for item in value)
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))


def _words(given: Iterable[Any], setting: str, found: dict[str, Callable[..., Any]]) -> tuple[str, ...]:
    """Return names as they are and words for callables, which go into `found`."""
    names = []
    for each in given:
        if not (isinstance(each, str) or callable(each)):
            kind = "a class, or the name of one" if setting == "environment" else "functions, or names of some"
            raise InputError(f"{setting} is a {type(each).__name__}; give {kind}, such as file.py:Name.")
        if isinstance(each, str):
            names.append(each)
            continue
        named = each.func if isinstance(each, functools.partial) else each
        name = PREFIX + str(getattr(named, "__name__", type(named).__name__))
        same = sum(word.split(" ")[0] == name for word in found)
        names.append(f"{name} {same + 1}" if same else name)
        found[names[-1]] = each
    return tuple(names)


def _rewards(given: Any, weights: Any, functions: dict[str, Callable[..., Any]]) -> tuple[str, ...]:
    """Return the names of rewards with their weights, and put those that are callables into `functions`."""
    names: list[str] = []
    for reward in given if isinstance(given, (list, tuple)) else [given]:
        if not (isinstance(reward, str) or callable(reward)):
            hint = "; weights are reward_weights=[...]" if isinstance(reward, (tuple, int, float)) else ""
            raise InputError(f"a reward is a {type(reward).__name__}; give a function, or the name of a reward{hint}.")
        names += _words([reward], "reward", functions)
    if weights is None:
        return tuple(names)
    if not isinstance(weights, Iterable) or len(weights := list(weights)) != len(names):
        raise InputError(f"reward_weights is {weights!r}; give a list of {len(names)}, a number for each reward.")
    if twice := [name for name in names if split_weight(name)[0] != name]:
        raise InputError(f"reward {twice[0]!r} has a weight already; give all weights as reward_weights, or none.")
    return tuple(name if weight == 1 else f"{name}@{weight}" for name, weight in zip(names, weights, strict=True))
