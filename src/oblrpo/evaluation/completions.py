"""The figures of a benchmark, from a file of completions."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from oblrpo.errors import InputError
from oblrpo.evaluation.statistics import Estimate, clustered, majority_at, pass_at, powers_to
from oblrpo.tasks.benchmarks import BenchmarkProblem
from oblrpo.tasks.grading import MathVerifier, Verdict
from oblrpo.tasks.rows import read_objects

MOST_SLOW = 3  # the questions of a problem's votes that may take too long; each costs the whole time limit
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
                raise InputError(f"{where}: index {index}, sample {row['sample']!r} was in line {first} already.")
        completions[index].append(text)
    if missing := [index for index, texts in enumerate(completions) if not texts]:
        raise InputError(f"{path} has no completion for {_names(missing)}; every problem of the data needs one.")
    usual = Counter(map(len, completions)).most_common(1)[0][0]
    for what, differs in (("more", operator.gt), ("fewer", operator.lt)):
        if odd := [index for index, texts in enumerate(completions) if differs(len(texts), usual)]:
            raise InputError(
                f"{path} has {what} completions for {_names(odd)} than the {usual} of other problems; give equally "
                "many of each."
            )
    return completions


def _names(indices: list[int]) -> str:
    rest = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"index {', '.join(map(str, indices[:NAMED]))}{rest}"


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return results of `evaluate_completions` as a table for the terminal."""
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
    said = [f"{result[what]} {what}" for what in kinds if what in result]
    if "threshold" in result:
        said.insert(0, f"rewards {' + '.join(result['rewards'])}, pass: a reward of at least {result['threshold']:g}")
    if "mean_length" in result:
        said += [f"{result['mean_length']:.0f} tokens per completion", f"{result['clipped_ratio']:.1%} cut off"]
    return f"{_title(result)}: {', '.join(said)}"


def _title(result: dict[str, Any]) -> str:
    return str(result.get("benchmark") or result["data"])


@dataclass(frozen=True)
class Votes:
    """How many completions of a problem gave the right answer, how many each wrong answer, and how many none."""

    right: int
    others: list[int]
    silent: int
    uncompared: int = 0
    """Wrong answers that could not be compared in time, each of which counts as an answer of its own."""


def evaluate_completions(
    name: str,
    problems: Sequence[BenchmarkProblem],
    completions: Sequence[Sequence[str]],
    verifier: MathVerifier,
    ks: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the figures of a benchmark by the keys of its JSON: avg@k, pass@k, maj@k, and what could not be graded."""
    n = len(completions[0])
    ks = sorted(set(ks)) or powers_to(n)
    for k in ks:
        if not 1 <= k <= n:
            raise InputError(f"--k {k}: the file holds {n} completions a problem; k must be from 1 to {n}.")
    flat = verifier.grade(
        [problem.golds for problem in problems for _ in range(n)], [text for texts in completions for text in texts]
    )
    verdicts = [flat[row * n : (row + 1) * n] for row in range(len(problems))]
    correct = [sum(verdict.correct for verdict in row) for row in verdicts]
    if max(ks) > 1:
        votes = [count_votes(row, verifier) for row in verdicts]
    else:  # in draws of one the wrong answers need not be told apart
        votes = [Votes(c, [1] * (n - c), 0) for c in correct]
    reasons = Counter(verdict.reason for verdict in flat)
    return {
        "benchmark": name,
        "problems": len(problems),
        "samples": n,
        "avg@k": {"k": n, **as_json(clustered([c / n for c in correct]))},
        "pass@k": {str(k): as_json(clustered([pass_at(k, c, n) for c in correct])) for k in ks},
        "maj@k": {str(k): as_json(clustered([majority_at(k, v.right, v.others, v.silent) for v in votes])) for k in ks},
        "timeouts": reasons["timeout"],
        "unparsable": reasons["unparsable"],
        "crashed": reasons["crashed"],
        "uncompared": sum(vote.uncompared for vote in votes),
    }


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as results hold it."""
    return {"value": estimate.value, "interval": list(estimate.interval) if estimate.interval else None}


def count_votes(verdicts: Sequence[Verdict], verifier: MathVerifier) -> Votes:
    """Return the votes for each answer of one problem; equal answers in different spellings are one answer.

    The right answers are one answer. A wrong one joins the first wrong answer before it that it equals. After
    `MOST_SLOW` questions of a problem that took too long no more are asked.
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
