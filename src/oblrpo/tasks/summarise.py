"""Summarise a short passage in a few words, for a reward that is neither mathematics nor right or wrong."""

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path

from oblrpo.errors import InputError
from oblrpo.tasks.overlap import rouge_l
from oblrpo.tasks.task import Problem, check_whole, split_position

PASSAGES = Path(__file__).with_name("summaries.jsonl")
PROMPT = "{passage}\nSummary:\n"
HELDOUT_FRACTION = 0.25


class SummariseTask:
    """Passages of two or three sentences, each with two short summaries; all ship with the package.

    The answer of a problem is its summaries, a line each. There are 72 passages, 17 of them held out: enough to see a
    run work on a reward of another kind, too few to measure anything.
    """

    name = "summarise"
    default_rewards = ("task",)

    def __init__(self, seed: int = 0) -> None:
        """Set the seed of the training batches; the held-out passages do not depend on it."""
        self.seed = seed
        placed = [
            (split_position(passage), Problem(PROMPT.replace("{passage}", passage), "\n".join(summaries)))
            for passage, summaries in read_passages()
        ]
        placed.sort(key=lambda row: row[0])
        self._heldout = [problem for place, problem in placed if place < HELDOUT_FRACTION]
        self._train = [problem for place, problem in placed if place >= HELDOUT_FRACTION]

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the `size` passages of one step, a piece of an epoch's permutation; a larger size repeats passages.

        Raises:
            InputError: `size` is not positive.
        """
        check_whole("Task 'summarise': the batch size", size, 1)
        epoch, batch = divmod(step, max(1, len(self._train) // size))
        order = random.Random(f"summarise/{self.seed}/{epoch}").sample(self._train, len(self._train))
        return list(islice(cycle(order), batch * size, (batch + 1) * size))

    def heldout(self, size: int) -> list[Problem]:
        """Return `size` held-out passages; fewer are always the first of more.

        Raises:
            InputError: `size` is not positive, or larger than their number.
        """
        check_whole("Task 'summarise': the held-out size", size, 1)
        if size > len(self._heldout):
            raise InputError(
                f"Task 'summarise' has {len(self._heldout)} held-out passages, but {size} were asked for; "
                "set eval_prompts lower."
            )
        return self._heldout[:size]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return ROUGE-L F1 with the better of the summaries, in [0, 1]."""
        return max(rouge_l(summary, completion) for summary in problem.answer.splitlines())

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """Return `reward` of each completion, of the problem at its place."""
        return [self.reward(problem, text) for problem, text in zip(problems, completions, strict=True)]

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return one of the summaries, each word dropped or replaced by one of the passage with probability `noise`."""
        passage = problem.text.removesuffix(PROMPT.partition("{passage}")[2]).split()
        shown = []
        for word in rng.choice(problem.answer.splitlines()).split():
            if rng.random() >= noise:
                shown.append(word)
            elif rng.random() < 0.5:
                shown.append(rng.choice(passage))
        return " ".join(shown)


@lru_cache(maxsize=1)
def read_passages() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the passages that ship, each with its summaries."""
    rows = map(json.loads, PASSAGES.read_text(encoding="utf-8").splitlines())
    return tuple((row["passage"], tuple(row["summaries"])) for row in rows)
