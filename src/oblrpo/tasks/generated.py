"""Tasks whose problems are drawn at random: the batches and the held-out split they share."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from oblrpo.errors import InputError
from oblrpo.tasks.task import Problem, check_whole, split_position

HELDOUT_FRACTION = 0.1
# So many draws in a row without a new problem mean that (nearly) all have been seen.
EXHAUSTED_AFTER = 5000


class GeneratedTask(ABC):
    """Base of the generated tasks; a subclass says how to draw, verify and demonstrate a problem."""

    name: str
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
