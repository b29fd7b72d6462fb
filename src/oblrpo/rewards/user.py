"""Reward functions of the user, in TRL's signature: f(prompts, completions, **columns) -> list of float or None."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from oblrpo.errors import InputError, did_you_mean

Reward = Callable[..., Sequence[float | None]]
OnError = Literal["raise", "mask"]
MEND = "rewards must be finite numbers; such completions are left out with on_reward_error mask."


def load_reward(path: str) -> Reward:
    """Return the function at `package.module.function` or `file.py:function`; the module or file is run.

    Raises:
        InputError: there is no such file, module or function, or it fails when it is imported.
    """
    file, colon, name = path.rpartition(":")
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not name.isidentifier():
        raise InputError(
            f"reward '{path}' is no path of a function; write package.module.function or file.py:function."
        )
    try:
        module = _run_file(Path(file)) if colon else importlib.import_module(file)
    except InputError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise InputError(f"reward '{path}' cannot be imported: {type(error).__name__}: {error}.") from error
    function = getattr(module, name, None)
    if function is None:
        names = [word for word, value in vars(module).items() if callable(value)]
        raise InputError(f"reward '{path}': {file} has no function '{name}'.{did_you_mean(name, names)}")
    if not callable(function):
        raise InputError(f"reward '{path}' is a {type(function).__name__}, not a function.")
    found: Reward = function
    return found


def _run_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise InputError(f"reward file {file} does not exist; check the path.")
    # A name of its own, so that two files called reward.py do not take each other's place.
    name = f"oblrpo_reward_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"reward file {file} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def split_weight(text: str) -> tuple[str, float]:
    """Return path and weight of `path` (weight 1) or `path@0.5`.

    Raises:
        InputError: what follows the last @ is no finite number.
    """
    path, sign, weight = text.rpartition("@")
    if not sign:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"reward '{text}': the weight after @ is {weight!r}; it must be a finite number.")
    return path, value


@dataclass
class RewardErrors:
    """What went wrong so far, by reward."""

    calls: dict[str, int] = field(default_factory=dict)
    """Calls that raised or returned no list of the right length."""
    values: dict[str, int] = field(default_factory=dict)
    """Completions with NaN, an infinity or something that is no number."""
    nothing: dict[str, int] = field(default_factory=dict)
    """Completions with None; an error only if no other reward has a number for them."""


class RewardSet:
    """Several rewards as one: the weighted sum over those that apply to a completion.

    As in TRL, a reward that returns None for a completion does not apply to it and adds nothing; NaN, an infinity, a
    value that is no number, a wrong length, an exception and a completion to which no reward applies are errors.
    `on_error` "raise" ends with one sentence that names the reward; "mask" leaves the completion out: its sum is None.
    Either way `errors` counts.
    """

    def __init__(self, paths: Sequence[str], on_error: OnError = "raise") -> None:
        """Load rewards, each `package.module.function` or `file.py:function`, with `@weight` after it if not 1.

        Raises:
            InputError: none is given, one twice, one cannot be loaded, or `on_error` is neither raise nor mask.
        """
        if on_error not in {"raise", "mask"}:
            raise InputError(f"on_reward_error is {on_error!r}; choose raise or mask.")
        if not paths:
            raise InputError("no reward is given; name at least one function.")
        self.on_error = on_error
        self.errors = RewardErrors()
        self._rewards: dict[str, tuple[Reward, float]] = {}
        for text in paths:
            path, weight = split_weight(text)
            if path in self._rewards:
                raise InputError(f"reward '{path}' is given twice; add its weights.")
            self._rewards[path] = (load_reward(path), weight)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> list[float | None]:
        """Return the weighted sum for each completion, None where it is masked.

        Raises:
            InputError: with on_error "raise", a reward raised or returned what is no reward.
        """
        total: list[float | None] = [None] * len(completions)
        bad: set[int] = set()
        for name, (reward, weight) in self._rewards.items():
            for s, value in enumerate(self._values(name, reward, prompts, completions, columns or {})):
                if value is None:
                    continue
                if math.isnan(value):
                    bad.add(s)
                else:
                    total[s] = (total[s] or 0.0) + weight * value
        for s, value in enumerate(total):
            if value is None and s not in bad and self.on_error == "raise":
                names = ", ".join(f"'{name}'" for name in self._rewards)
                raise InputError(f"reward {names} returned None for completion {s} ({completions[s][:40]!r}); {MEND}")
        return [None if s in bad else value for s, value in enumerate(total)]

    def _values(
        self, name: str, reward: Reward, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> list[float | None]:
        """Return one reward's values, NaN for what was an error and is masked."""
        masked: list[float | None] = [math.nan] * len(completions)
        try:
            values = reward(
                prompts=list(prompts), completions=list(completions), **{k: list(columns[k]) for k in columns}
            )
        except Exception as error:  # the user's code may raise anything
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self._failed(
                name, f"raised {type(error).__name__}: {error} ({Path(frame.filename).name} line {frame.lineno})"
            )
            return masked
        try:
            listed = list(values)
        except TypeError:
            self._failed(name, f"returned a {type(values).__name__}, not a list of numbers")
            return masked
        if len(listed) != len(completions):
            self._failed(name, f"returned {len(listed)} values for {len(completions)} completions")
            return masked
        return [self._checked(name, s, value, completions) for s, value in enumerate(listed)]

    def _checked(self, name: str, s: int, value: Any, completions: Sequence[str]) -> float | None:
        if value is None:
            self.errors.nothing[name] = self.errors.nothing.get(name, 0) + 1
            return None
        try:
            number = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        self.errors.values[name] = self.errors.values.get(name, 0) + 1
        if self.on_error == "raise":
            raise InputError(f"reward '{name}' returned {value!r} for completion {s} ({completions[s][:40]!r}); {MEND}")
        return math.nan

    def _failed(self, name: str, what: str) -> None:
        self.errors.calls[name] = self.errors.calls.get(name, 0) + 1
        if self.on_error == "raise":
            raise InputError(f"reward '{name}' {what}; mend it, or leave such batches out with on_reward_error mask.")
