"""Several rewards as one: built-in ones by name, the user's own by path or as callables; named when they fail.

Built-in ones have the signature of the user's own: f(prompts, completions, **columns) -> list of numbers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from os.path import isfile
from typing import Any, Literal

from oblrpo.errors import InputError, did_you_mean
from oblrpo.rewards.user import LARGEST, PythonReward, RewardFailed, Values, WorkerReward, accepted
from oblrpo.tasks import Problem, Task, Verifier
from oblrpo.tasks.data import last_number
from oblrpo.tasks.grading import MathVerifier, last_box
from oblrpo.tasks.rows import plain
from oblrpo.workers import in_thread

Texts = Sequence[str]


def exact(prompts: Texts, completions: Texts, answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 where the completion is the answer, every run of white space counting as one space."""
    return [float(_text(gold).split() == text.split()) for gold, text in zip(answer, completions, strict=True)]


def numeric(prompts: Texts, completions: Texts, answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 where the last numbers of completion and answer are equal.

    Examples:
        >>> numeric(["What do 17 of them cost?"], ["That makes $1234.00."], answer=["#### 1,234"])
        [1.0]
    """
    wanted = [last_number(_text(gold)) for gold in answer]
    return [
        float(number is not None and number == last_number(text))
        for number, text in zip(wanted, completions, strict=True)
    ]


def boxed(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    r"""Return 1 where the text ends in a \boxed{} that is closed and not empty, where the math reward looks first."""
    return [float(bool((last_box(text) or "").strip())) for text in completions]


def words(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """Return the number of words of each completion; a negative weight makes them cost something."""
    return [float(len(text.split())) for text in completions]


class Math:
    """1 if the completion's answer equals the gold answer, by `MathVerifier`: worker processes with a time limit."""

    def __init__(self) -> None:
        self.verifier = MathVerifier()
        self.close = self.verifier.close

    def __call__(self, /, prompts: Texts, completions: Texts, answer: Sequence[Any], **columns: Any) -> list[float]:
        """Return the grades; an answer that is a list must be given in full."""
        golds = [gold if isinstance(gold, (list, tuple)) else _text(gold) for gold in answer]
        return [float(verdict.correct) for verdict in self.verifier.grade(golds, completions)]


def _text(gold: Any) -> str:
    return plain(gold) or str(gold)


BUILT_IN: dict[str, Callable[[], Callable[..., Sequence[float]]]] = {
    "math": Math,
    "exact": lambda: exact,
    "numeric": lambda: numeric,
    "format": lambda: boxed,
    "length": lambda: words,
}
"""What makes each reward, by its name."""

NEED_ANSWER = {"math", "exact", "numeric"}  # names of the rewards that compare with the column `answer`


OnError = Literal["raise", "mask"]
FIX = "rewards must be finite numbers, at most 1e12 in size; on_reward_error mask leaves such completions out."


class Rewards:
    """The reward F of every completion: the weighted sum of those rewards that apply to it.

    Rewards have TRL's signature, f(prompts, completions, **columns) -> list of float or None, and get what they ask
    for by name. As in TRL, those that are `async def` are awaited at once, after the others, and one that returns None
    for a completion does not apply to it and adds nothing. NaN, an infinity, a value that is no number, a
    wrong length, an exception, a call that takes longer than `seconds`, a completion to which none applies: errors.
    `on_error` "raise" ends with one sentence that names the reward; "mask" leaves the completion out.
    A function found by its path runs in a process of its own, which is killed when it is late; one of `functions` runs
    in this process, as long as it takes.
    """

    def __init__(
        self,
        task: Task | None,
        names: Sequence[str] = (),
        on_error: OnError = "raise",
        seconds: float = 60.0,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Load rewards: math, exact, numeric, format, length, `package.module.function` or `file.py:function`.

        A weight other than 1 follows after `@`. Without names they are the task's default rewards. The name `task`
        means the task's own verifier. `functions` holds callables of the user's program by name.
        """
        further: dict[str, Callable[..., Any]] = {}
        if isinstance(task, Verifier):

            def verify(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any) -> Any:
                return task.rewards([Problem(*pair) for pair in zip(prompts, answer, strict=True)], completions)

            further["task"] = verify
        further |= {name: PythonReward(function) for name, function in (functions or {}).items()}
        self.names = list(names if task is None else names or task.default_rewards)
        self.task: Any = task
        self._on_error = on_error
        self._rewards: dict[str, tuple[Any, float]] = {}
        self._earned: dict[str, list[float]] = {}
        try:
            for text in self.names:
                name, weight = split_weight(text)
                if name in self._rewards:
                    raise InputError(f"reward '{name}' is given twice; add its weights.")
                self._rewards[name] = _load(name, further, seconds), weight
        except InputError:
            self.close()
            raise
        self.needs_ids = any(accepted(["completion_ids"], getattr(f, "takes", ())) for f, _ in self._rewards.values())
        """Whether some are given the tokens of completions."""

    def digests_and_gaps(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """SHA-256 of what each reward of the user's is now, by name, empty if there is none; and what it lacks."""
        users = {name: reward for name, (reward, _) in self._rewards.items() if hasattr(reward, "takes")}
        return {name: reward.digest_and_gaps() for name, reward in users.items()}

    def digests(self) -> dict[str, str]:
        """The digests that can be had, by their names among the sources of a run."""
        return {f"rewards {name}": digest for name, (digest, _) in self.digests_and_gaps().items() if digest}

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        for reward, _ in self._rewards.values():
            if hasattr(reward, "close"):
                reward.close()

    def take_earned(self) -> dict[str, list[float]]:
        """Return each reward's values since the last call, unweighted, by its function's name as in TRL, if unique."""
        earned, self._earned = self._earned, {}
        short = {name: re.split(r"[:.]", name)[-1] for name in earned}
        often = Counter(short.values())
        return {name if often[short[name]] > 1 else short[name]: values for name, values in earned.items()}

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
        golds = [problem.golds or problem.answer for problem in problem_S]
        sums = self.sums([problem.prompt for problem in problem_S], completions, columns, ids, golds)
        groups = [sums[start : start + G] for start in range(0, len(sums), G)]
        valid_PG = [[value is not None for value in group] for group in groups]
        return [[value or 0.0 for value in group] for group in groups], valid_PG

    def sums(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        ids: Callable[[], list[list[int]]] | None = None,
        golds: Sequence[Any] | None = None,
    ) -> list[float | None]:
        """Return the weighted sum for each completion, None where it is masked; ours compare it with `golds`."""
        given = {**columns, "prompts": prompts, "completions": completions}
        if ids is not None and self.needs_ids:
            given["completion_ids"] = ids()
        later = [name for name, (reward, _) in self._rewards.items() if getattr(reward, "waits", False)]
        ours = given if golds is None else given | {"answer": golds}
        for_each = {name: given if hasattr(each, "takes") else ours for name, (each, _) in self._rewards.items()}
        values = {name: self._values(name, for_each[name]) for name in self._rewards if name not in later}
        calls = {name: in_thread(self._values, name, given) for name in later}
        values |= {name: call.result() for name, call in calls.items()}
        names = ", ".join(f"'{name}'" for name in self._rewards)
        for name in self._rewards:
            self._earned.setdefault(name, []).extend(value for value in values[name] if isinstance(value, float))
        return [
            self._sum([values[name][s] for name in self._rewards], names, f"completion {s} ({text[:40]!r}); {FIX}")
            for s, text in enumerate(completions)
        ]

    def _sum(self, values: list[float | list[str] | None], names: str, where: str) -> float | None:
        if any(isinstance(value, list) for value in values):
            return None
        weighed = zip(values, self._rewards.values(), strict=True)
        parts = [weight * value for value, (_, weight) in weighed if isinstance(value, float)]
        total = sum(parts)
        if parts and abs(total) <= LARGEST:
            return total
        self._failed(f"reward {names} {f'with its weight is {total:g}' if parts else 'returned None'} for {where}")
        return None

    def _values(self, name: str, given: Mapping[str, Any]) -> Values:
        """Return the values of one reward, [] for those of a failed call that is masked."""
        completions = given["completions"]
        try:
            values: Values = self._rewards[name][0](**given)
            if len(values) != len(completions):
                raise RewardFailed(f"returned {len(values)} values for {len(completions)} completions")
        except RewardFailed as what:
            # The cause is what a function of this process raised, with its traceback.
            fix = "fix it, or leave such batches out with on_reward_error mask."
            self._failed(f"reward '{name}' {what}; {fix}", what.__cause__)
            return [[]] * len(completions)
        for s, value in enumerate(values):
            if isinstance(value, list):
                self._failed(f"reward '{name}' returned {value[0]} for completion {s} ({completions[s][:40]!r}); {FIX}")
        return values

    def _failed(self, message: str, cause: BaseException | None = None) -> None:
        """Report a failure, where failures are no masks."""
        if self._on_error == "raise":
            raise InputError(message) from cause


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
