"""Regular expressions of users, matched in a worker process: one that backtracks for years is left where it stands."""

import re
import signal
import sys
from collections import deque
from collections.abc import Sequence

LONGEST = 1.0  # CPU seconds for one completion
TOLD = (
    "reward 'regex': {0!r} was matched for over a second on a completion, which counts as no match; avoid repetitions "
    "inside repetitions, such as (a+)+."
)
_told: set[str] = set()


class _Late(Exception):  # noqa: N818  (what happened, not an error of ours)
    pass


def _late(*_: object) -> None:
    raise _Late


def matches(
    completions: Sequence[str], patterns: Sequence[str], golds: Sequence[str] | None, whole: bool
) -> list[float]:
    """Return 1 where the pattern is found, or matches all; with `golds`, where its last first group holds the gold.

    One that takes longer than `LONGEST` has not matched, and is named on standard error.
    """
    signal.signal(signal.SIGVTALRM, _late)
    earned = []
    for s, (text, pattern) in enumerate(zip(completions, patterns, strict=True)):
        match: re.Match[str] | None = None
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
            try:
                if golds is None:
                    match = re.fullmatch(pattern, text) if whole else re.search(pattern, text)
                else:
                    found = [re.fullmatch(pattern, text)] if whole else re.finditer(pattern, text)
                    match = next(iter(deque(found, maxlen=1)), None)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except _Late:
            match = None
            if pattern not in _told:
                print(TOLD.format(pattern[:100]), file=sys.stderr)
                _told.add(pattern)
        earned.append(float(match is not None and (golds is None or (match[1] or "").split() == golds[s].split())))
    return earned
