"""The process that compares formulas; see `oblrpo.workers`."""

from typing import Any

from oblrpo.workers import serve

# Address space of the process; a tower of exponents takes all there is.
MEMORY = 2 << 30


def reply(message: Any) -> str:
    """Return "right" or "wrong" for [golds, answer], "unparsable" if it is wrong and a formula could not be read."""
    from oblrpo.tasks.grading.compare import equal
    from oblrpo.tasks.grading.relations import Unreadable, same

    unreadable = False

    def algebra(gold: str, answer: str) -> bool:
        nonlocal unreadable
        try:
            return same(gold, answer)
        except Unreadable:
            unreadable = True
            return False

    try:
        golds, answer = message
        if equal(golds, answer, algebra):
            return "right"
        return "unparsable" if unreadable else "wrong"
    except Exception:  # no text may end the process; MemoryError and RecursionError are among these
        return "unparsable"


def main() -> None:
    """Grade until the input ends."""
    import oblrpo.tasks.grading.relations  # noqa: F401  (slow; before the clock of the first grading starts)

    serve(reply, MEMORY)
