"""The grades of a benchmark: by comparison with the gold answers, and by votes of a problem's completions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oblrpo.evaluation.evaluate import Ids
from oblrpo.evaluation.statistics import clustered, majority_at
from oblrpo.tasks.grading import MathVerifier, Verdict
from oblrpo.tasks.task import Problem

MOST_SLOW = 3  # the questions of a problem's votes that may take too long; each costs the whole time limit


@dataclass(frozen=True)
class Votes:
    """How many completions of a problem gave the right answer, how many each wrong answer, and how many none."""

    right: int
    others: list[int]
    silent: int
    uncompared: int = 0
    """Wrong answers that could not be compared in time, each of which counts as an answer of its own."""


class BenchmarkGrader:
    """Rewards completions with 1 if they are right, and remembers what the votes of all problems need."""

    def __init__(self, verifier: MathVerifier) -> None:
        self._verifier = verifier
        self._verdicts_P: list[list[Verdict]] = []

    def __call__(
        self, problems: list[Problem], completions: list[str], ids: Ids = None
    ) -> tuple[list[list[float]], list[list[bool]]]:
        """Return the rewards of completions, (P, G), all of them valid."""
        n = len(completions) // len(problems)
        golds = [problem.columns["answer"] for problem in problems for _ in range(n)]
        flat = self._verifier.grade(golds, completions)
        verdicts_P = [flat[start : start + n] for start in range(0, len(flat), n)]
        self._verdicts_P += verdicts_P
        return [[float(verdict.correct) for verdict in row] for row in verdicts_P], [[True] * n] * len(problems)

    def figures(self, ks: Sequence[int]) -> dict[str, Any]:
        """Return maj@k of all that was graded, and how much could not be graded, as results hold them."""
        if max(ks) > 1:
            votes = [count_votes(row, self._verifier) for row in self._verdicts_P]
        else:  # in draws of one, which wrong answers are equal does not matter
            right = [sum(verdict.correct for verdict in row) for row in self._verdicts_P]
            votes = [Votes(c, [1] * (len(row) - c), 0) for c, row in zip(right, self._verdicts_P, strict=True)]
        reasons = Counter(verdict.reason for row in self._verdicts_P for verdict in row)
        return {
            "maj@k": {
                str(k): clustered([majority_at(k, v.right, v.others, v.silent) for v in votes]).as_json() for k in ks
            },
            "timeouts": reasons["timeout"],
            "unparsable": reasons["unparsable"],
            "crashed": reasons["crashed"],
            "uncompared": sum(vote.uncompared for vote in votes),
        }


def count_votes(verdicts: Sequence[Verdict], verifier: MathVerifier) -> Votes:
    """Return the votes for each answer of one problem; equal answers in different spellings are one answer.

    The right answers are one answer. A wrong one joins the first wrong answer before it that it equals. After
    `MOST_SLOW` comparisons of a problem that took too long no more are made.
    """
    wrong = Counter(verdict.extracted for verdict in verdicts if not verdict.correct and verdict.extracted)
    classes: dict[str, int] = {}
    comparable: list[str] = []  # the first answer of each class, but for those that took too long
    uncompared = 0
    for answer, count in wrong.items():
        first = _first_equal(answer, comparable, verifier) if uncompared < MOST_SLOW else None
        if first is None:
            uncompared += 1
        elif first == answer:
            comparable.append(answer)
        classes[first or answer] = classes.get(first or answer, 0) + count
    silent = sum(not verdict.correct and not verdict.extracted for verdict in verdicts)
    return Votes(sum(verdict.correct for verdict in verdicts), list(classes.values()), silent, uncompared)


def _first_equal(answer: str, earlier: list[str], verifier: MathVerifier) -> str | None:
    """The first of the earlier answers that this one equals, itself if there is none, None if that took too long."""
    for other in earlier:
        [same] = verifier.compare([(other,)], [answer])
        if same.correct:
            return other
        if same.reason in {"timeout", "crashed"}:
            return None
    return answer
