"""The process that grades: one JSON object a line in, one out. It is killed from outside when it takes too long."""

import json
import os
import signal
import sys

# What a grading may use; a tower of exponents takes all there is.
MEMORY = 2 << 30


def grade(golds: list[str], answer: str) -> str:
    """Return "right", "wrong", or "unparsable" if an unreadable formula decided."""
    from oblrpo.tasks.grading.algebra import Unreadable, same_formula
    from oblrpo.tasks.grading.compare import equal

    unreadable = False

    def algebra(gold: str, answer: str) -> bool:
        nonlocal unreadable
        try:
            return same_formula(gold, answer)
        except Unreadable:
            unreadable = True
            return False

    if equal(golds, answer, algebra):
        return "right"
    return "unparsable" if unreadable else "wrong"


def main() -> None:
    """Say "ready", then answer line by line until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing a library prints may come between the replies
    _limit_memory()
    import oblrpo.tasks.grading.algebra  # noqa: F401  (slow; before the clock of the first grading starts)

    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        golds, answer, seconds = json.loads(line)
        _end_after(seconds)
        try:
            reply = grade(golds, answer)
        except (MemoryError, RecursionError):
            reply = "unparsable"
        except Exception:  # no text may end the worker
            reply = "unparsable"
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


def _end_after(seconds: float) -> None:
    """Have the system end this process a little later than the parent would, in case the parent is gone."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(int(seconds) + 3)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
