"""Completions of problems, graded and counted: a run's held-out accuracy and the figures of every evaluation."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oblrpo.errors import InputError
from oblrpo.evaluation.statistics import Estimate, clustered, pass_at, sizes
from oblrpo.tasks.task import Problem

Ids = Callable[[], list[list[int]]] | None  # returns the tokens of completions, where they are known
Grader = Callable[[list[Problem], list[str], Ids], tuple[list[list[float]], list[list[bool]]]]
"""Returns the rewards of a batch, (P, G), and which are valid, as `oblrpo.rewards.Rewards` does."""


@dataclass(frozen=True)
class Evaluation:
    """What the completions of each problem earned."""

    samples: int
    """Completions a problem."""
    ks: list[int]
    """Sizes for pass@k and maj@k."""
    rewards_P: list[list[float]]
    """The rewards of each problem, without those that are masked, which count nowhere."""

    @property
    def masked(self) -> int:
        """How many completions are masked."""
        return self.samples * len(self.rewards_P) - sum(map(len, self.rewards_P))

    def average(self) -> Estimate:
        """Return avg@k, the mean over problems of their mean rewards; NaN where every completion is masked.

        The interval of rewards that all lie in [0, 1] is cut to it.
        """
        flat = [value for rewards in self.rewards_P for value in rewards] or [math.nan]
        bounds = (0.0, 1.0) if 0 <= min(flat) <= max(flat) <= 1 else (-math.inf, math.inf)
        return clustered([math.fsum(rewards) / len(rewards) for rewards in self.rewards_P if rewards], *bounds)

    def figures(self, threshold: float = 1.0) -> dict[str, Any]:
        """Return problems, samples, avg@k and, where none is masked, pass@k, as results hold them."""
        if not any(self.rewards_P):
            raise InputError("all completions are masked, so there is no reward to be averaged.")
        average = {"k": self.samples, **self.average().as_json()}
        figures: dict[str, Any] = {"problems": len(self.rewards_P), "samples": self.samples, "avg@k": average}
        if not self.masked:
            passed = [sum(value >= threshold for value in rewards) for rewards in self.rewards_P]
            figures["pass@k"] = {
                str(k): clustered([pass_at(k, c, self.samples) for c in passed]).as_json() for k in self.ks
            }
        return figures


def evaluate(
    batches: Iterable[tuple[list[Problem], list[str], Ids]], samples: int, grade: Grader, ks: Sequence[int] = ()
) -> Evaluation:
    """Grade batches of problems and their completions, `samples` of each problem after another; `ks` as of `sizes`."""
    ks, rewards_P = sizes(ks, samples), list[list[float]]()
    for batch in batches:
        for values_G, valid_G in zip(*grade(*batch), strict=True):
            rewards_P.append([value for value, valid in zip(values_G, valid_G, strict=True) if valid])
    return Evaluation(samples, ks, rewards_P)


def batches_of(
    problems: Sequence[Problem], completions: Sequence[Sequence[str]], size: int, ids: list[list[int]] | None = None
) -> Iterator[tuple[list[Problem], list[str], Ids]]:
    """Yield completions of each problem that are there already, those of `size` problems at once."""
    n = len(completions[0])
    for start in range(0, len(problems), size):
        part = slice(start, start + size)
        texts = [text for texts in completions[part] for text in texts]
        yield list(problems[part]), texts, None if ids is None else ids[start * n : start * n + len(texts)].copy
