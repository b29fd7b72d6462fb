"""Several rewards as one: built-in ones by name, the user's own by path or as callables; named when they fail.

Built-in ones have the signature of the user's own: f(prompts, completions, **columns) -> list of numbers.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from os.path import isfile
from typing import Any, Literal

from oblrpo.errors import InputError, did_you_mean
from oblrpo.rewards.built_in import BUILT_IN, built_in, is_built_in
from oblrpo.rewards.user import LARGEST, PythonReward, RewardFailed, Values, WorkerReward, accepted
from oblrpo.settings.shared import split_weight
from oblrpo.tasks import Problem, Task, Verifier
from oblrpo.tasks.data import Fault
from oblrpo.tasks.episode import Episode
from oblrpo.workers import in_thread

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
        environment: str = "",
    ) -> None:
        """Load rewards: those of `BUILT_IN` with their options, `package.module.function` or `file.py:function`.

        A weight other than 1 follows after `@`. Without names they are the task's default rewards. The name `task`
        means the task's own verifier. `functions` holds callables of the user's program by name. `environment` is the
        class whose `get_reward` is the reward of its name.
        """
        further: dict[str, Callable[..., Any]] = {}
        if isinstance(task, Verifier):

            def verify(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any) -> Any:
                return task.rewards([Problem(*pair) for pair in zip(prompts, answer, strict=True)], completions)

            further["task"] = verify
        if environment:
            further[environment] = lambda episodes, **_: [episode.reward for episode in episodes]
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
                self._rewards[name] = _load(name, further, task, seconds), weight
        except InputError:
            self.close()
            raise
        self.needs_ids = any(
            accepted(["completion_ids"], getattr(f, "takes", ())) or getattr(f, "needs_ids", False)
            for f, _ in self._rewards.values()
        )
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
        """Return each reward's values since the last call, unweighted, by its name without path or options, if unique.

        As in TRL, that of a function is the function's.
        """
        earned, self._earned = self._earned, {}
        short = {name: name.partition(":")[0] if is_built_in(name) else re.split(r"[:.]", name)[-1] for name in earned}
        often = Counter(short.values())
        return {name if often[short[name]] > 1 else short[name]: values for name, values in earned.items()}

    def __call__(
        self,
        problems: list[Problem],
        completions: Sequence[str | Episode],
        ids: Callable[[], list[list[int]]] | None = None,
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
        completions: Sequence[str | Episode],
        columns: Mapping[str, Sequence[Any]],
        ids: Callable[[], list[list[int]]] | None = None,
        golds: Sequence[Any] | None = None,
    ) -> list[float | None]:
        """Return the weighted sum for each completion, None where it is masked; ours compare it with `golds`.

        Of an episode ours read the last message, if it is an answer; it is masked where its environment has ended.
        """
        given = {**columns, "prompts": prompts, "completions": completions}
        episodes = [each for each in completions if isinstance(each, Episode)]
        if episodes and all(each.environment is not None for each in episodes):  # as in TRL
            given["environments"] = [each.environment for each in episodes]
        if ids is not None and self.needs_ids:
            given["completion_ids"] = ids()
        later = [name for name, (reward, _) in self._rewards.items() if getattr(reward, "waits", False)]
        answers = [each if isinstance(each, str) else each.answer for each in completions]
        ours = given | {"completions": answers, "episodes": episodes} | ({} if golds is None else {"answer": golds})
        # A column that is named is the data's own, also where it is called `answer` and the answer is another.
        named = {
            name for name, (each, _) in self._rewards.items() if hasattr(each, "takes") or vars(each).get("column")
        }
        for_each = {name: given if name in named else ours for name in self._rewards}
        gone = {s for s, each in enumerate(completions) if isinstance(each, Episode) and not each.whole}
        values = {name: self._values(name, for_each[name], gone) for name in self._rewards if name not in later}
        calls = {name: in_thread(self._values, name, given, gone) for name in later}
        values |= {name: call.result() for name, call in calls.items()}
        names = ", ".join(f"'{name}'" for name in self._rewards)
        for name in self._rewards:
            self._earned.setdefault(name, []).extend(value for value in values[name] if isinstance(value, float))
        return [
            self._sum([values[name][s] for name in self._rewards], names, f"{place(completions, s)}; {FIX}")
            for s in range(len(completions))
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

    def _values(self, name: str, given: Mapping[str, Any], gone: Set[int]) -> Values:
        """Return the values of one reward, [] for those of a failed call that is masked, and of those that are gone."""
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
        values = [[] if s in gone else value for s, value in enumerate(values)]
        for s, value in enumerate(values):
            if isinstance(value, list) and value:
                self._failed(f"reward '{name}' returned {value[0]} for {place(completions, s)}; {FIX}")
        return values

    def _failed(self, message: str, cause: BaseException | None = None) -> None:
        """Report a failure, where failures are no masks."""
        if self._on_error == "raise":
            raise InputError(message) from cause


def place(completions: Sequence[str | Episode], s: int) -> str:
    """Return a completion's number and how it begins, for messages."""
    said = completions[s]
    return f"completion {s} ({(said if isinstance(said, str) else said.text)[:40]!r})"


def of_rows(names: Sequence[str]) -> tuple[bool, list[Fault]]:
    """Return whether some of these rewards compare with the answer, and what says why a row cannot be graded."""
    ours = [built_in(name) for name, _ in map(split_weight, names) if is_built_in(name)]
    return any(getattr(each, "compares", False) for each in ours), [e.fault for e in ours if hasattr(e, "fault")]


def _load(name: str, further: Mapping[str, Callable[..., Any]], task: Any, seconds: float) -> Callable[..., Values]:
    if name in further:
        return further[name]
    if is_built_in(name):
        reward: Callable[..., Values] = built_in(name, task, seconds)
        return reward
    if isfile(f"{name}.py"):
        name = f"{name}.py"
    names, head = list(dict.fromkeys([*BUILT_IN, *further])), name.partition(":")[0]
    if not {".", ":"} & set(name) or (head.isidentifier() and did_you_mean(head, BUILT_IN)):
        raise InputError(
            f"unknown reward '{name}'; choose one of: {', '.join(names)}, or write package.module.function or "
            f"file.py:function.{did_you_mean(head, names)}"
        )
    return WorkerReward(name, seconds)
