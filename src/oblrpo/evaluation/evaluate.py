"""Completions of problems, graded and counted: a run's held-out accuracy and the figures of every evaluation."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.table import Table

from oblrpo.errors import InputError
from oblrpo.intervals import Z95
from oblrpo.tasks.episode import Episode
from oblrpo.tasks.grading import MathVerifier, Verdict
from oblrpo.tasks.rows import read_objects
from oblrpo.tasks.task import Problem


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its uncertainty."""

    value: float  # the mean; NaN of nothing
    stderr: float = math.nan
    """The standard error over problems, since the completions of one problem are not independent."""
    interval: tuple[float, float] | None = None  # the 95 % interval; none for a single problem

    def as_json(self) -> dict[str, Any]:
        """Return value and interval as results hold them."""
        return {"value": self.value, "interval": list(self.interval) if self.interval else None}


def clustered(values_P: Sequence[float], least: float = 0.0, most: float = 1.0) -> Estimate:
    """Return the mean over problems +- 1.96 s / sqrt(P), s the standard deviation over problems.

    The interval is cut to [least, most]. Each problem gives one value: its completions are dependent, and problems are
    what was drawn.
    """
    P = len(values_P)
    mean = math.fsum(values_P) / P if P else math.nan
    if P < 2:
        return Estimate(mean)
    variance = sum((value - mean) * (value - mean) for value in values_P) / (P - 1)
    stderr = math.sqrt(variance) / math.sqrt(P)
    return Estimate(mean, stderr, (max(least, mean - Z95 * stderr), min(most, mean + Z95 * stderr)))


def pass_at(k: int, correct: int, n: int) -> float:
    """Return the chance that k of the n completions, drawn without replacement, hold a right one.

    With c right ones this is 1 - C(n - c, k) / C(n, k), unbiased for pass@k (Chen et al. 2021, arXiv:2107.03374).
    """
    return float(1 - Fraction(math.comb(n - correct, k), math.comb(n, k)))


def majority_at(k: int, right: int, others: Sequence[int], silent: int = 0) -> float:
    """Return the exact chance that the most frequent answer of k completions, drawn without replacement, is right.

    `right` completions give the right answer, `others[i]` the i-th wrong one, `silent` none at all (no vote).
    A tie of t answers counts 1 / t, as if one of them were drawn. The draws in which the right answer has r votes and
    t others have as many are C(right, r) times the coefficient of x^(k-r) y^t in
    prod_i (sum_{a<r} C(n_i, a) x^a + C(n_i, r) x^r y) * (1 + x)^silent.
    """
    n = right + sum(others) + silent
    won = Fraction(0)
    for r in range(1, min(right, k) + 1):
        draws = {(0, 0): 1}  # (completions drawn, answers tied) -> ways
        for size in others:
            draws = _with_answer(draws, size, r, k - r)
        for (drawn, tied), ways in draws.items():
            won += Fraction(math.comb(right, r) * ways * math.comb(silent, k - r - drawn), 1 + tied)
    return float(won / math.comb(n, k))


def _with_answer(draws: dict[tuple[int, int], int], size: int, most: int, room: int) -> dict[tuple[int, int], int]:
    """Return the ways after one more wrong answer, which has at most `most` votes."""
    result: dict[tuple[int, int], int] = {}
    for (drawn, tied), ways in draws.items():
        for votes in range(min(size, most, room - drawn) + 1):
            place = (drawn + votes, tied + (votes == most))
            result[place] = result.get(place, 0) + ways * math.comb(size, votes)
    return result


def sizes(ks: Sequence[int], n: int) -> list[int]:
    """Return the sizes of draws from n completions: those that are given, in order, or 1, 2, 4, ... and n."""
    for k in ks:
        if not 1 <= k <= n:
            raise InputError(f"k is {k}; with {n} completions a problem it must be from 1 to {n}.")
    return sorted(set(ks) or {1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


Ids = Callable[[], list[list[int]]] | None  # returns the tokens of completions, where they are known
Grader = Callable[[list[Problem], Any, Ids], tuple[list[list[float]], list[list[bool]]]]
"""Returns the rewards of a batch, (P, G), and which are valid, as `oblrpo.rewards.Rewards` does."""


@dataclass(frozen=True)
class Evaluation:
    """What the completions of each problem earned."""

    samples: int  # completions a problem
    ks: list[int]  # sizes for pass@k and maj@k
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
            raise InputError("all completions are masked, so there is no reward to average.")
        average = {"k": self.samples, **self.average().as_json()}
        figures: dict[str, Any] = {"problems": len(self.rewards_P), "samples": self.samples, "avg@k": average}
        if not self.masked:
            passed = [sum(value >= threshold for value in rewards) for rewards in self.rewards_P]
            figures["pass@k"] = {
                str(k): clustered([pass_at(k, c, self.samples) for c in passed]).as_json() for k in self.ks
            }
        return figures


def evaluate(
    batches: Iterable[tuple[list[Problem], Sequence[str | Episode], Ids]],
    samples: int,
    grade: Grader,
    ks: Sequence[int] = (),
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


NAMED = 5  # of many indices, how many an error names


def read_completions(path: Path, problems: int) -> list[list[str]]:
    """Return the completions of every problem from rows `{"index": 3, "completion": "..."}`, equally many of each.

    With a column `sample`, no (index, sample) may come twice.
    """
    completions: list[list[str]] = [[] for _ in range(problems)]
    seen: dict[tuple[int, str], int] = {}
    for line, row in read_objects(path):
        where = f"{path} line {line}"
        index, text = row.get("index"), row.get("completion")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < problems:
            raise InputError(f"{where}: column 'index' must be a row of the data, from 0 to {problems - 1}.")
        if not isinstance(text, str):
            raise InputError(f"{where}: column 'completion' must be text.")
        if "sample" in row:
            first = seen.setdefault((index, repr(row["sample"])), line)
            if first != line:
                raise InputError(f"{where}: index {index}, sample {row['sample']!r} is already in line {first}.")
        completions[index].append(text)
    if missing := [index for index, texts in enumerate(completions) if not texts]:
        raise InputError(f"{path} has no completion for {_names(missing)}; every problem of the data needs one.")
    usual = Counter(map(len, completions)).most_common(1)[0][0]
    if odd := [index for index, texts in enumerate(completions) if len(texts) != usual]:
        raise InputError(
            f"{path} has more or fewer completions for {_names(odd)} than the {usual} of other problems; give equally "
            "many of each."
        )
    return completions


def _names(indices: list[int]) -> str:
    rest = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"index {', '.join(map(str, indices[:NAMED]))}{rest}"


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return results as a table for the terminal."""
    shown = Table("", "problems", "", "value", "95 % interval")
    for result in results:
        rows = [(f"avg@{result['samples']}", result["avg@k"])]
        rows += [(f"{name}@{k}", value) for name in ("pass", "maj") for k, value in result.get(f"{name}@k", {}).items()]
        for line, (name, estimate) in enumerate(rows):
            first = (_title(result), f"{result['problems']} x {result['samples']}") if line == 0 else ("", "")
            interval = " - ".join(f"{end:.4f}" for end in estimate["interval"] or ()) or "(one problem)"
            shown.add_row(*first, name, f"{estimate['value']:.4f}", interval)
        shown.add_section()
    return shown


def remarks(result: dict[str, Any]) -> str:
    """Return one line on what could not be graded, and on lengths where they are known."""
    kinds = ("timeouts", "unparsable", "crashed", "uncompared", "masked")
    parts = [f"{result[what]} {what}" for what in kinds if what in result]
    if "threshold" in result:
        parts.insert(0, f"rewards {' + '.join(result['rewards'])}, pass: a reward of at least {result['threshold']:g}")
    if "mean_length" in result:
        parts += [f"{result['mean_length']:.0f} tokens per completion", f"{result['clipped_ratio']:.1%} cut off"]
    return f"{_title(result)}: {', '.join(parts)}"


def _title(result: dict[str, Any]) -> str:
    return str(result.get("benchmark") or result["data"])


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
