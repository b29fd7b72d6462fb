"""Rewards of a batch of completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oblrpo.rewards.reward_set import OnError, RewardSet
from oblrpo.rewards.user import PythonReward
from oblrpo.tasks import Problem, Task, Verifier


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

        Raises:
            InputError: as `RewardSet` raises.
        """
        self.task = task
        own: dict[str, Callable[..., Any]] = {"task": _Own(task)} if isinstance(task, Verifier) else {}
        own |= {name: PythonReward(function) for name, function in (functions or {}).items()}
        self.names = list(names or task.default_rewards)
        self._set = RewardSet(self.names, on_error, seconds, own)

    def __call__(self, problems: list[Problem], completions: list[str]) -> tuple[list[list[float]], list[list[bool]]]:
        """Return F_PG, where completion p G + j answers problem p, and which of them are valid; a masked one has a 0.

        Raises:
            InputError: a reward failed, or returned what is no reward, and is not to be masked.
        """
        G = len(completions) // len(problems)
        asked = [problem for problem in problems for _ in range(G)]
        names = {"answer"}.union(*(problem.columns for problem in problems))
        columns = {name: [problem.columns.get(name) for problem in asked] for name in sorted(names)}
        columns["answer"] = [problem.columns.get("answer", problem.answer) for problem in asked]
        values = self._set([problem.prompt for problem in asked], completions, columns)
        groups = [values[start : start + G] for start in range(0, len(values), G)]
        valid_PG = [[value is not None for value in group] for group in groups]
        return [[value or 0.0 for value in group] for group in groups], valid_PG

    @property
    def failures(self) -> int:
        """Count of failed calls so far, and of values that were no rewards."""
        return self._set.errors.total

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the source of each reward that is the user's, by name, where it can be had."""
        return self._set.digests

    def close(self) -> None:
        """End what runs in other processes."""
        self._set.close()


class _Own:
    """The task's verifier as a reward."""

    def __init__(self, task: Verifier) -> None:
        self._task = task

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[float]:
        asked = [Problem(*each) for each in zip(prompts, answer, strict=True)]
        return self._task.rewards(asked, completions)
