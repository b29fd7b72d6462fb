"""Several rewards as one: built-in ones by name, the user's own by path or as callables; named when they fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oblrpo.errors import InputError, did_you_mean
from oblrpo.rewards.builtin import BUILT_IN
from oblrpo.rewards.user import LARGEST, RewardFailed, Values, WorkerReward, plain_reward

OnError = Literal["raise", "mask"]
MEND = "rewards must be finite numbers, at most 1e12 in size; such completions are left out with on_reward_error mask."


@dataclass
class RewardErrors:
    """What went wrong so far, by reward."""

    calls: dict[str, int] = field(default_factory=dict)
    """Calls that raised, hung, or returned no list of the right length."""
    values: dict[str, int] = field(default_factory=dict)
    """Completions with NaN, an infinity or something that is no number."""
    nothing: dict[str, int] = field(default_factory=dict)
    """Completions with None; an error only if no other reward has a number for them."""

    @property
    def total(self) -> int:
        """Failed calls, and values that are no rewards."""
        return sum(self.calls.values()) + sum(self.values.values())


class RewardSet:
    """The weighted sum of those rewards that apply to a completion.

    Rewards have TRL's signature, f(prompts, completions, **columns) -> list of float or None. As in TRL, one that
    returns None for a completion does not apply to it and adds nothing. NaN, an infinity, a value that is no number, a
    wrong length, an exception, a call that takes longer than `seconds`, a completion to which none applies: errors.
    `on_error` "raise" ends with one sentence that names the reward; "mask" leaves the completion out: its sum is None.
    Either way `errors` counts. A function found by its path runs in a process of its own, which is killed when it is
    late; one of `further` runs in this process, as long as it takes.
    """

    def __init__(
        self,
        names: Sequence[str],
        on_error: OnError = "raise",
        seconds: float = 60.0,
        further: Mapping[str, Callable[..., Sequence[float]]] | None = None,
    ) -> None:
        """Load rewards: math, exact, numeric, format, length, `package.module.function` or `file.py:function`.

        A weight other than 1 follows after `@`. `further` holds other rewards by name.

        Raises:
            InputError: none is given, one twice, one cannot be loaded, or `on_error` is neither raise nor mask.
        """
        if on_error not in {"raise", "mask"}:
            raise InputError(f"on_reward_error is {on_error!r}; choose raise or mask.")
        if not names:
            raise InputError("no reward is given; name at least one function.")
        if not 0 < seconds < float("inf"):
            raise InputError(f"reward_seconds is {seconds!r}; it must be a positive number.")
        self.on_error, self.errors = on_error, RewardErrors()
        self._rewards: dict[str, tuple[Callable[..., Values], float]] = {}
        known = BUILT_IN | {name: _constant(reward) for name, reward in (further or {}).items()}
        try:
            for text in names:
                name, weight = split_weight(text)
                if name in self._rewards:
                    raise InputError(f"reward '{name}' is given twice; add its weights.")
                self._rewards[name] = (_make(name, known, seconds), weight)
        except InputError:
            self.close()
            raise

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the source of each reward that is the user's, by name, where it can be had."""
        found = {name: getattr(reward, "digest", "") for name, (reward, _) in self._rewards.items()}
        return {name: digest for name, digest in found.items() if digest}

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        for reward, _ in self._rewards.values():
            getattr(reward, "close", lambda: None)()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> list[float | None]:
        """Return the weighted sum for each completion, None where it is masked.

        Raises:
            InputError: with on_error "raise", a reward failed or returned what is no reward.
        """
        total: list[float | None] = [None] * len(completions)
        bad: set[int] = set()
        for name, (reward, weight) in self._rewards.items():
            for s, value in enumerate(self._values(name, reward, prompts, completions, columns or {})):
                if isinstance(value, float):
                    total[s] = (total[s] or 0.0) + weight * value
                elif value is not None:
                    bad.add(s)
        for s, value in enumerate(total):
            if value is None and s not in bad and self.on_error == "raise":
                names = ", ".join(f"'{name}'" for name in self._rewards)
                raise InputError(f"reward {names} returned None for completion {s} ({completions[s][:40]!r}); {MEND}")
        for s, value in enumerate(total):
            if value is not None and abs(value) > LARGEST and s not in bad:
                self._count_too_large(s, value)
                bad.add(s)
        return [None if s in bad else value for s, value in enumerate(total)]

    def _count_too_large(self, s: int, value: float) -> None:
        """Count a weighted sum that is too large, under all rewards.

        Raises:
            InputError: with on_error "raise".
        """
        names = ", ".join(f"'{name}'" for name in self._rewards)
        self.errors.values[names] = self.errors.values.get(names, 0) + 1
        if self.on_error == "raise":
            raise InputError(f"reward {names} with its weight is {value:g} for completion {s}; {MEND}")

    def _values(
        self,
        name: str,
        reward: Callable[..., Values],
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Any],
    ) -> Values:
        """Return the values of one reward, [] for those of a failed call that is masked.

        Raises:
            InputError: as `__call__` raises.
            RewardFailed: never; it is caught here.
        """
        try:
            values = reward(prompts=prompts, completions=completions, **columns)
            values = [value if isinstance(value, list) else plain_reward(value) for value in values]
            if len(values) != len(completions):
                raise RewardFailed(f"returned {len(values)} values for {len(completions)} completions")
        except RewardFailed as what:
            self.errors.calls[name] = self.errors.calls.get(name, 0) + 1
            if self.on_error == "raise":
                raise InputError(
                    f"reward '{name}' {what}; mend it, or leave such batches out with on_reward_error mask."
                ) from what.__cause__  # what a function of this process raised, with its traceback
            return [[]] * len(completions)
        for s, value in enumerate(values):
            if value is None:
                self.errors.nothing[name] = self.errors.nothing.get(name, 0) + 1
            elif isinstance(value, list):
                self.errors.values[name] = self.errors.values.get(name, 0) + 1
                if self.on_error == "raise":
                    start = completions[s][:40]
                    raise InputError(f"reward '{name}' returned {value[0]} for completion {s} ({start!r}); {MEND}")
        return values


def split_weight(text: str) -> tuple[str, float]:
    """Return name and weight of `name` (weight 1) or `name@0.5`.

    Raises:
        InputError: what follows the last @ is no finite number.
    """
    name, sign, weight = text.rpartition("@")
    if not sign:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"reward '{text}': the weight after @ is {weight!r}; it must be a finite number.")
    return name, value


def _make(name: str, known: Mapping[str, Callable[[], Any]], seconds: float) -> Callable[..., Values]:
    if name in known:
        reward: Callable[..., Values] = known[name]()
        return reward
    if "." not in name:
        raise InputError(
            f"unknown reward '{name}'; choose one of: {', '.join(known)}, or write package.module.function or "
            f"file.py:function.{did_you_mean(name, known)}"
        )
    return WorkerReward(name, seconds)


def _constant(reward: Callable[..., Sequence[float]]) -> Callable[[], Any]:
    return lambda: reward
