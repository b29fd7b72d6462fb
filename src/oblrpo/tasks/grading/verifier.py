"""Grading completions against gold answers; formulas are compared in processes with a hard time limit."""

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from oblrpo.errors import InputError, pip_install
from oblrpo.tasks.grading.compare import NeedsAlgebra, equal
from oblrpo.tasks.grading.extract import extract_answer, is_list
from oblrpo.workers import Worker, WorkerDied

Reason = Literal["ok", "timeout", "unparsable", "crashed"]


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion. `reason` is "ok" if it could be graded, whether right or wrong."""

    correct: bool
    reason: Reason
    extracted: str


class MathVerifier:
    """Grades answers in LaTeX or plain text by equality with the gold answers; use it as a context manager.

    Numbers, lists, tuples, intervals and words are compared in this process, formulas by math-verify in `processes`
    workers: fresh interpreters (never forks of this one), each killed after `seconds` on one grading and replaced.
    """

    def __init__(self, processes: int = 1, seconds: float = 5.0) -> None:
        """Set the number of processes and the time limit; a process starts with the first formula that needs it."""
        if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
            raise InputError(f"processes must be a whole number of at least 1, got {processes!r}.")
        if not 0 < seconds < float("inf"):
            raise InputError(f"seconds must be a positive number, got {seconds!r}.")
        if not all(map(importlib.util.find_spec, ("math_verify", "latex2sympy2_extended", "antlr4"))):
            raise InputError(f"the math verifier needs math-verify; install it with: {pip_install('math')}")
        self.seconds = seconds
        self._workers = [Worker("oblrpo.tasks.grading.worker:main") for _ in range(processes)]

    def __enter__(self) -> "MathVerifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()

    def grade(self, golds: Sequence[Sequence[str] | str], completions: Sequence[str]) -> list[Verdict]:
        """Return a verdict for each completion; one with several golds must list them all, in any order."""
        if len(golds) != len(completions):
            raise InputError(f"{len(golds)} gold answers do not fit {len(completions)} completions.")
        wanted = [(gold,) if isinstance(gold, str) else tuple(gold) for gold in golds]
        for row, gold in enumerate(wanted):
            if not gold or not all(isinstance(part, str) and part.strip() for part in gold):
                raise InputError(f"the gold answer of completion {row} is empty or not text.")
        answers = [
            extract_answer(completion, several=len(gold) > 1 or is_list(gold[0]))
            for gold, completion in zip(wanted, completions, strict=True)
        ]
        return self.compare(wanted, answers)

    def compare(self, golds: Sequence[tuple[str, ...]], answers: Sequence[str | None]) -> list[Verdict]:
        """Return a verdict for each answer, extracted before; None is unparsable."""
        pairs = dict.fromkeys((g, a) for g, a in zip(golds, answers, strict=True) if a is not None)
        verdicts = {}
        for pair in pairs:
            with suppress(NeedsAlgebra):  # numbers and structure decide most of them
                verdicts[pair] = Verdict(equal(*pair, _needs_algebra), "ok", pair[1])
        hard = [pair for pair in pairs if pair not in verdicts]
        verdicts.update(zip(hard, self._ask(hard), strict=True))
        nothing = Verdict(False, "unparsable", "")
        return [nothing if a is None else verdicts[g, a] for g, a in zip(golds, answers, strict=True)]

    def _ask(self, pairs: list[tuple[tuple[str, ...], str]]) -> list[Verdict]:
        if not pairs:
            return []
        idle = list(self._workers)  # list.pop and append are atomic; there are as many threads as workers

        def one(pair: tuple[tuple[str, ...], str]) -> Verdict:
            worker = idle.pop()
            try:
                reply = worker.ask(pair, self.seconds)
            except TimeoutError:
                reply = "timeout"
            except WorkerDied:
                reply = "crashed"
            finally:
                idle.append(worker)
            reason: Reason = "ok" if reply in {"right", "wrong"} else cast("Reason", reply)
            return Verdict(reply == "right", reason, pair[1])

        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                return list(threads.map(one, pairs))
            except BaseException:  # an interrupt must not wait for all that is left
                threads.shutdown(wait=False, cancel_futures=True)
                raise


def _needs_algebra(gold: str, answer: str) -> bool:
    raise NeedsAlgebra
