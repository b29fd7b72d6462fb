"""Grade completions against gold answers, formulas in worker processes with a hard time limit each."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, cast

from oblrpo.errors import InputError
from oblrpo.tasks.grading.compare import NeedsAlgebra, equal
from oblrpo.tasks.grading.extract import extract_answer

Reason = Literal["ok", "timeout", "unparsable", "crashed"]

# Seconds for a worker to start: it imports sympy, on a busy machine.
START = 120.0
_MAIN = "from oblrpo.tasks.grading.worker import main; main()"


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion; `reason` is "ok" when it could be graded, whether right or wrong."""

    correct: bool
    reason: Reason
    extracted: str


class MathVerifier:
    """Grades answers in LaTeX or plain text by equality with the gold answers; use it as a context manager.

    Numbers, lists, tuples, intervals and words are compared in this process, formulas by math-verify in `processes`
    workers: fresh interpreters (never forks of this one), each killed after `seconds` on one grading and replaced.
    """

    def __init__(self, processes: int = 1, seconds: float = 5.0) -> None:
        """Start nothing yet: a worker starts with the first formula it is needed for.

        Raises:
            InputError: math-verify is not installed, or a parameter is not positive.
        """
        if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
            raise InputError(f"processes must be a whole number of at least 1, got {processes!r}.")
        if not 0 < seconds < float("inf"):
            raise InputError(f"seconds must be a positive number, got {seconds!r}.")
        if importlib.util.find_spec("math_verify") is None:
            raise InputError("the math verifier needs math-verify; install it with: pip install 'oblrpo[math]'")
        self.seconds = seconds
        self._workers = [_Worker() for _ in range(processes)]

    def __enter__(self) -> "MathVerifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()

    def grade(self, golds: Sequence[Sequence[str] | str], completions: Sequence[str]) -> list[Verdict]:
        """Return one verdict a completion; several golds for one must all be listed, in any order.

        Raises:
            InputError: golds and completions are not equally many, or an entry has no gold.
        """
        if len(golds) != len(completions):
            raise InputError(f"{len(golds)} gold answers do not fit {len(completions)} completions.")
        wanted = [(gold,) if isinstance(gold, str) else tuple(gold) for gold in golds]
        for row, gold in enumerate(wanted):
            if not gold or not all(isinstance(part, str) and part.strip() for part in gold):
                raise InputError(f"the gold answer of completion {row} is empty or not text.")
        answers = [extract_answer(completion) for completion in completions]
        return self.compare(wanted, answers)

    def compare(self, golds: Sequence[tuple[str, ...]], answers: Sequence[str | None]) -> list[Verdict]:
        """Return one verdict an answer that was extracted before; None is unparsable."""
        asked = list(dict.fromkeys((g, a) for g, a in zip(golds, answers, strict=True) if a is not None))
        known = {pair: verdict for pair in asked if (verdict := _without_algebra(*pair)) is not None}
        hard = [pair for pair in asked if pair not in known]
        known.update(zip(hard, self._ask(hard), strict=True))
        nothing = Verdict(False, "unparsable", "")
        return [nothing if a is None else known[g, a] for g, a in zip(golds, answers, strict=True)]

    def _ask(self, pairs: list[tuple[tuple[str, ...], str]]) -> list[Verdict]:
        if not pairs:
            return []
        idle = list(self._workers)  # list.pop and append are atomic; there are as many threads as workers

        def one(pair: tuple[tuple[str, ...], str]) -> Verdict:
            worker = idle.pop()
            try:
                reply = worker.ask(*pair, self.seconds)
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


def _without_algebra(golds: tuple[str, ...], answer: str) -> Verdict | None:
    """Return the verdict if numbers and structure decide; None if computer algebra must."""
    try:
        return Verdict(equal(golds, answer, _needs_algebra), "ok", answer)
    except NeedsAlgebra:
        return None


def _needs_algebra(gold: str, answer: str) -> bool:
    raise NeedsAlgebra


class _Worker:
    """One process, started when first asked and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, golds: tuple[str, ...], answer: str, seconds: float) -> str:
        """Return right, wrong, unparsable, timeout, or crashed (out of memory, a fault of the interpreter)."""
        if self._process is None:
            self._start()
        return self._exchange(json.dumps([golds, answer, seconds]), seconds)

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            for stream in (self._process.stdin, self._process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:  # what was not written is lost with the process
                    pass
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        # The worker finds what we find, and nothing in the current folder takes a module's place.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=env,
        )
        if self._exchange(None, START) != "ready":
            raise InputError(
                f"the worker of the math verifier does not start; try: {sys.executable} -c 'import math_verify'"
            )

    def _exchange(self, line: str | None, seconds: float) -> str:
        """Send a line and return the reply; the process is killed when the time is up."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            if line is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:  # it died before it read
            reply = ""
        finally:
            timer.cancel()
        if late.is_set() or not reply:
            self.stop()
        if reply.endswith("\n"):
            return str(json.loads(reply))
        return "timeout" if late.is_set() else "crashed"
