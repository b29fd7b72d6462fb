"""The interface of a task: problems to train on, problems kept apart, and a verifier; and those drawn at random."""

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Protocol, runtime_checkable

from oblrpo.errors import InputError
from oblrpo.tasks.rows import as_text

SAID = {"tool_calls", "function_call", "tool_responses", "tool_plan", "reasoning_content", "reasoning", "thinking"}
"""Keys of a message that are part of what it says; others, such as an id or a weight, say something about it."""
NO_ARGS: Mapping[str, Any] = {}
"""The arguments of most conversations."""


class Messages(list[dict[str, Any]]):
    """A conversation for a chat template: `{"role": ..., "content": ...}` each, perhaps with `tool_calls`."""

    __slots__ = ("template_args", "where")  # there may be a million

    def __init__(
        self, messages: Iterable[dict[str, Any]], where: str = "", template_args: Mapping[str, Any] = NO_ARGS
    ) -> None:
        super().__init__(messages)
        self.where = where
        """Where they stand in the data."""
        self.template_args = template_args
        """Arguments of the template of their own, `tools` among them."""


@dataclass(frozen=True)
class Problem:
    """One question."""

    prompt: str | list[dict[str, Any]]
    """What the policy continues: text as it is, or messages for its chat template."""
    answer: str
    """The reference answer, or whatever else the verifier needs, as text."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a reward may need, by the name of its argument."""
    question: str = ""
    """The prompt before it was put into a template; empty if there was no template."""
    golds: tuple[str, ...] = ()
    """The reference answers of a benchmark, where a completion must give several."""

    @property
    def text(self) -> str:
        """The prompt as text; messages become their contents, a line each, and what else they say follows as JSON."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(map(_said, self.prompt))

    @property
    def key(self) -> str:
        """The prompt before any template, without regard to case and spacing."""
        return " ".join((self.question or self.text).casefold().split())


@runtime_checkable
class Task(Protocol):
    """A source of problems with a verifiable reward."""

    @property
    def name(self) -> str:
        """Short name used in configs, logs and reports."""

    @property
    def about(self) -> str:
        """What a completion is to do, in a sentence; of data, how many rows of which files."""

    @property
    def default_rewards(self) -> Sequence[str]:
        """Names of the rewards that apply unless others are named; `task` is the task's own."""

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the `size` problems of one training step, a pure function of seed, step and size."""

    def heldout(self, size: int, least: int | None = None) -> list[Problem]:
        """Return `size` problems that no training batch contains, whatever the seed; or all, if `least` at least."""


@runtime_checkable
class Verifier(Task, Protocol):
    """A task that says itself what a completion is worth, from the problem's prompt and answer alone."""

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """Return the reward of each completion, of the problem at its place; never raises."""


class Demonstrator(Verifier, Protocol):
    """A task that can also write worked solutions, for a supervised warm start."""

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return one worked solution, in which each step goes wrong with probability `noise`."""


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if type(content) is str and len(message) == 2 and "role" in message:  # most messages
        return content
    further = {key: value for key, value in message.items() if key in SAID}
    return " ".join(as_text(part) for part in (content, further) if part)


def split_position(key: str) -> float:
    """Return the fixed place of `key` in [0, 1); the places below the held-out fraction are held out."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def check_whole(what: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is a whole number from `low` to `high`."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high):
        return value
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise InputError(f"{what} must be a whole number {span}, got {value!r}.")


HELDOUT_FRACTION = 0.1
# So many draws in a row without a new problem mean that (nearly) all have been seen.
EXHAUSTED_AFTER = 5000


class GeneratedTask(ABC):
    """Base of the generated tasks; a subclass says how to draw, verify and demonstrate a problem."""

    name: str
    about = ""
    default_rewards = ("task",)

    def __init__(self, seed: int = 0) -> None:
        """Set the seed of the training batches; the held-out problems do not depend on it."""
        self.seed = seed

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Return one random problem."""

    @abstractmethod
    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion solves the problem, otherwise 0.0; never raises."""

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """Return `reward` of each completion, of the problem at its place."""
        return [self.reward(problem, text) for problem, text in zip(problems, completions, strict=True)]

    @abstractmethod
    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return one worked solution, in which each step goes wrong with probability `noise`."""

    def stream(self, rng: random.Random) -> Iterator[Problem]:
        """Yield random problems without end."""
        while True:
            yield self.draw(rng)

    def is_heldout(self, problem: Problem) -> bool:
        """Return whether the problem belongs to the held-out tenth, by a fixed hash of its prompt."""
        return is_heldout(problem.text)

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the `size` problems of one step; prompts repeat only when there are too few of them."""
        check_whole(f"Task '{self.name}': the batch size", size, 1)
        problems = self._collect(random.Random(f"{self.name}/{self.seed}/{step}"), size, heldout=False)
        if not problems:
            raise InputError(f"Task '{self.name}' has no training problem with these parameters; widen them.")
        return list(islice(cycle(problems), size))

    def heldout(self, size: int, least: int | None = None) -> list[Problem]:
        """Return `size` distinct held-out problems, or all if these are `least`; fewer are the first of more."""
        check_whole(f"Task '{self.name}': the held-out size", size, 1)
        problems = self._collect(random.Random(f"{self.name}/heldout"), size, heldout=True)
        if len(problems) < (least or size):
            raise InputError(
                f"Task '{self.name}' has about {len(problems)} held-out problems with these parameters, "
                f"but {least or size} are needed; ask for fewer or widen the parameters."
            )
        return problems

    def _collect(self, rng: random.Random, size: int, *, heldout: bool) -> list[Problem]:
        problems: dict[str, Problem] = {}
        idle = 0
        for problem in self.stream(rng):
            idle += 1
            if problem.text not in problems and self.is_heldout(problem) == heldout:
                problems[problem.text] = problem
                idle = 0
            if len(problems) == size or idle == EXHAUSTED_AFTER:
                break
        return list(problems.values())


def is_heldout(prompt: str) -> bool:
    """Return whether a generated prompt belongs to the held-out tenth.

    The order of numbers, of edges and of the letters in an edge does not count, so that no held-out
    problem is a mere reordering of a training problem.
    """
    parts = sorted("".join(sorted(part)) for part in re.findall(r"[a-z0-9]+", prompt))
    return split_position(" ".join(parts)) < HELDOUT_FRACTION
