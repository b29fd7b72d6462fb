"""Several rewards as one: built-in ones by name, the user's own by path or as callables; named when they fail."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from typing import Any, Literal

from oblrpo.errors import InputError, did_you_mean
from oblrpo.rewards.builtin import BUILT_IN
from oblrpo.rewards.user import LARGEST, PythonReward, RewardFailed, Values, WorkerReward, asked_of, plain_reward
from oblrpo.tasks import Problem, Task, Verifier
from oblrpo.workers import begun

OnError = Literal["raise", "mask"]
MEND = "rewards must be finite numbers, at most 1e12 in size; such completions are left out with on_reward_error mask."


@dataclass
class RewardErrors:
    """What went wrong so far, by reward."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls that raised, hung, or returned no list of the right length."""
    values: Counter[str] = field(default_factory=Counter)
    """Completions with NaN, an infinity or something that is no number."""
    nothing: Counter[str] = field(default_factory=Counter)
    """Completions with None; an error only if no other reward has a number for them."""

    @property
    def total(self) -> int:
        """Failed calls, and values that are no rewards."""
        return sum(self.calls.values()) + sum(self.values.values())


class RewardSet:
    """The weighted sum of those rewards that apply to a completion.

    Rewards have TRL's signature, f(prompts, completions, **columns) -> list of float or None, and get what they ask
    for by name. As in TRL, those that are `async def` are awaited at once, after the others, and one that returns None
    for a completion does not apply to it and adds nothing. NaN, an infinity, a value that is no number, a
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
        """
        if on_error not in {"raise", "mask"}:
            raise InputError(f"on_reward_error is {on_error!r}; choose raise or mask.")
        if not names:
            raise InputError("no reward is given; name at least one function.")
        if not 0 < seconds < float("inf"):
            raise InputError(f"reward_seconds is {seconds!r}; it must be a positive number.")
        self.on_error, self.errors = on_error, RewardErrors()
        self._rewards: dict[str, tuple[Any, float]] = {}
        self.earned: dict[str, list[float]] = {}
        """What each reward gave, without its weight, since this was last emptied."""
        try:
            for text in names:
                name, weight = split_weight(text)
                if name in self._rewards:
                    raise InputError(f"reward '{name}' is given twice; add its weights.")
                self._rewards[name] = _load(name, further or {}, seconds), weight
        except InputError:
            self.close()
            raise
        self.ask_ids = {
            name
            for name, (each, _) in self._rewards.items()
            if asked_of(["completion_ids"], getattr(each, "takes", []))
        }
        """Those that are given the tokens of completions."""

    def likenesses(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """SHA-256 of what each reward of the user's is now, by name, empty if there is none; and what it lacks."""
        users = {name: reward for name, (reward, _) in self._rewards.items() if hasattr(reward, "takes")}
        return {name: reward.likeness() for name, reward in users.items()}

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        for reward, _ in self._rewards.values():
            if hasattr(reward, "close"):
                reward.close()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        ids: Callable[[], list[list[int]]] | None = None,
    ) -> list[float | None]:
        """Return the weighted sum for each completion, None where it is masked; `ids` returns their tokens."""
        sums: list[float | None] = [None] * len(completions)
        masked: set[int] = set()
        given = {**(columns or {}), "prompts": prompts, "completions": completions}
        later = {name for name, (reward, _) in self._rewards.items() if getattr(reward, "waits", False)}
        values = {name: self._values(name, given, ids) for name in self._rewards if name not in later}
        calls = {name: begun(self._values, name, given, ids) for name in later}
        values |= {name: call.result() for name, call in calls.items()}
        for name, (_, weight) in self._rewards.items():
            self.earned.setdefault(name, []).extend(value for value in values[name] if isinstance(value, float))
            for s, value in enumerate(values[name]):
                if isinstance(value, float):
                    sums[s] = (sums[s] or 0.0) + weight * value
                elif value is not None:
                    masked.add(s)
        names = ", ".join(f"'{name}'" for name in self._rewards)
        for s, value in enumerate(sums):
            if value is None and s not in masked and self.on_error == "raise":
                raise InputError(f"reward {names} returned None for completion {s} ({completions[s][:40]!r}); {MEND}")
            if value is not None and abs(value) > LARGEST and s not in masked:
                masked.add(s)
                self._failed(
                    self.errors.values, names, f"reward {names} with its weight is {value:g} for completion {s}; {MEND}"
                )
        return [None if s in masked else value for s, value in enumerate(sums)]

    def _values(self, name: str, given: Mapping[str, Any], ids: Callable[[], list[list[int]]] | None) -> Values:
        """Return the values of one reward, [] for those of a failed call that is masked."""
        reward, completions = self._rewards[name][0], given["completions"]
        try:
            if ids is not None and name in self.ask_ids:
                given = {**given, "completion_ids": ids()}
            values = reward(**given)
            values = [value if isinstance(value, list) else plain_reward(value) for value in values]
            if len(values) != len(completions):
                raise RewardFailed(f"returned {len(values)} values for {len(completions)} completions")
        except RewardFailed as what:
            message = f"reward '{name}' {what}; fix it, or leave such batches out with on_reward_error mask."
            # The cause is what a function of this process raised, with its traceback.
            self._failed(self.errors.calls, name, message, what.__cause__)
            return [[]] * len(completions)
        for s, value in enumerate(values):
            if value is None:
                self.errors.nothing[name] += 1
            elif isinstance(value, list):
                message = f"reward '{name}' returned {value[0]} for completion {s} ({completions[s][:40]!r}); {MEND}"
                self._failed(self.errors.values, name, message)
        return values

    def _failed(self, counts: Counter[str], name: str, message: str, cause: BaseException | None = None) -> None:
        """Count a failure of the rewards called `name`; with on_error "raise" it is the end."""
        counts[name] += 1
        if self.on_error == "raise":
            raise InputError(message) from cause


class Rewards:
    """The reward F of every completion, by the named rewards or the task's own."""

    def __init__(
        self,
        task: Task,
        names: Sequence[str] = (),
        on_error: OnError = "raise",
        seconds: float = 60.0,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Load `names`, as `RewardSet` knows them, or the task's default rewards if none is named.

        The name `task` means the task's own verifier. `functions` holds callables of the user's program by name.
        """
        further: dict[str, Callable[..., Any]] = {}
        if isinstance(task, Verifier):

            def verify(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any) -> Any:
                return task.rewards([Problem(*pair) for pair in zip(prompts, answer, strict=True)], completions)

            further["task"] = verify
        further |= {name: PythonReward(function) for name, function in (functions or {}).items()}
        self.task, self.names = task, list(names or task.default_rewards)
        self._set = RewardSet(self.names, on_error, seconds, further)
        self.ask_ids, self.likenesses, self.close = bool(self._set.ask_ids), self._set.likenesses, self._set.close

    def __call__(
        self, problems: list[Problem], completions: list[str], ids: Callable[[], list[list[int]]] | None = None
    ) -> tuple[list[list[float]], list[list[bool]]]:
        """Return F_PG, where completion p G + j answers problem p, and which are valid; a masked one has a 0.

        `ids` returns the tokens of the completions, for rewards that ask for `completion_ids`.
        """
        G = len(completions) // len(problems)
        problem_S = [problem for problem in problems for _ in range(G)]
        names = {"answer"}.union(*(problem.columns for problem in problems)) - {"completion_ids"}
        columns = {name: [problem.columns.get(name) for problem in problem_S] for name in sorted(names)}
        columns["answer"] = [problem.columns.get("answer", problem.answer) for problem in problem_S]
        sums = self._set([problem.prompt for problem in problem_S], completions, columns, ids)
        groups = [sums[start : start + G] for start in range(0, len(sums), G)]
        valid_PG = [[value is not None for value in group] for group in groups]
        return [[value or 0.0 for value in group] for group in groups], valid_PG

    def digests(self) -> dict[str, str]:
        """The digests that can be had, by their names among the sources of a run."""
        return {f"rewards {name}": digest for name, (digest, _) in self.likenesses().items() if digest}

    @property
    def failures(self) -> int:
        """Count of failed calls so far, and of values that were no rewards."""
        return self._set.errors.total

    def take_earned(self) -> dict[str, list[float]]:
        """Return what each reward gave since this was last asked, without its weight, by its name in metrics.

        That is TRL's, the function's own, where no two are called alike.
        """
        earned, self._set.earned = self._set.earned, {}
        short = {name: re.split(r"[:.]", name)[-1] for name in earned}
        often = Counter(short.values())
        return {name if often[short[name]] > 1 else short[name]: values for name, values in earned.items()}


def split_weight(text: str) -> tuple[str, float]:
    """Return name and weight of `name` (weight 1) or `name@0.5`."""
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


def _load(name: str, further: Mapping[str, Callable[..., Any]], seconds: float) -> Callable[..., Values]:
    if name in further:
        return further[name]
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if isfile(f"{name}.py"):
        name = f"{name}.py"
    if not {".", ":"} & set(name):
        names = list(dict.fromkeys([*BUILT_IN, *further]))
        raise InputError(
            f"unknown reward '{name}'; choose one of: {', '.join(names)}, or write package.module.function or "
            f"file.py:function.{did_you_mean(name, names)}"
        )
    return WorkerReward(name, seconds)
