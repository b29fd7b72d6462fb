"""The process in which reasoning-gym makes problems and scores answers; see `oblrpo.workers`."""

import dataclasses
import json
import math
import random
import re
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from oblrpo.errors import InputError, did_you_mean
from oblrpo.workers import serve

# Address space; the largest data sets take an eighth of it.
MEMORY = 2 << 30
# Problems of one data set. Some data sets make all of theirs at once, others take long to load what they draw from.
BLOCK = 64
# Environment of the process: sets of text are walked in one order, or some data sets draw other problems in every
# process; and no pool of threads takes address space.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

REFUSED = {
    "composite": "it mixes other data sets; train on one of them",
    "game_of_life_halting": "it gives every answer that is not empty the full score",
    "puzzle24": "it does not check which numbers an answer uses, so that one answer solves every problem",
}
"""Data sets that cannot be trained on, and why."""

_NUMBERS = r"[\d\s+*/()-]|\.(?!\s*[a-z])"
_FUNCTIONS = "a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|Abs|pi"
_ARITHMETIC = re.compile(rf"(?!.*\*\s*\*)(?:{_NUMBERS}){{0,400}}", re.ASCII | re.DOTALL)
_ALGEBRA = re.compile(rf"(?:{_NUMBERS}|,|\b(?:{_FUNCTIONS}|[a-z])\b){{0,400}}", re.ASCII | re.IGNORECASE)
_LITERAL = re.compile(r"""[\w\s,'"[\]]{0,20000}""", re.ASCII)
_ANY = re.compile(".*", re.DOTALL)

EVALUATED = {
    "binary_matrix": _LITERAL,
    "n_queens": _LITERAL,
    "spiral_matrix": _LITERAL,
    "string_insertion": _LITERAL,
    "countdown": _ARITHMETIC,
    "intermediate_integration": _ALGEBRA,
    "polynomial_multiplication": _ALGEBRA,
    "simple_integration": _ALGEBRA,
    # These evaluate the problem and its own answer, never the completion's.
    "bitwise_arithmetic": _ANY,
    "number_sorting": _ANY,
}
"""Data sets whose scorers hand text to Python's eval, and what an answer must look like to reach them.

No pattern lets an attribute through, or a call of anything but the functions named above and single letters (sympy
knows E, I, N, O, Q and S). What they let through can at most take long, or much memory.
"""

_guarded = False


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to compile text while an answer is scored, in case a scorer of another version evaluates answers too."""
    if _guarded and event == "compile":
        raise PermissionError("answers are not evaluated")


@lru_cache(maxsize=4)
def _dataset(name: str, configuration: str, seed: int) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, seed=seed, size=BLOCK, **json.loads(configuration))


@lru_cache(maxsize=4096)
def _entry(name: str, configuration: str, seed: int, index: int) -> dict[str, Any]:
    import numpy

    dataset = _dataset(name, configuration, seed)
    random.seed(f"{seed}/{index}")  # a few draw from the generators that all share
    numpy.random.seed(zlib.crc32(f"{seed}/{index}".encode()))
    entry: dict[str, Any] = dataset[index]
    return entry


def check(name: str, configuration: str) -> None:
    """Check that reasoning-gym knows the name and accepts the configuration."""
    from reasoning_gym.factory import DATASETS

    if name in REFUSED:
        raise InputError(f"The task 'reasoning_gym/{name}' cannot be trained on: {REFUSED[name]}.")
    if name not in DATASETS:
        names = sorted(set(DATASETS) - set(REFUSED))
        close = did_you_mean(name, names)
        raise InputError(
            f"reasoning_gym has no task '{name}' among its {len(names)}"
            + (f".{close}" if close else f"; they are: {', '.join(names)}.")
        )
    fields = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in {"seed", "size"}]
    for key in json.loads(configuration):
        if key not in fields:
            raise InputError(
                f"Task 'reasoning_gym/{name}' has no parameter '{key}'; it has: "
                f"{', '.join(fields) or 'none'} and prompt_template.{did_you_mean(key, fields)}"
            )
    try:
        _dataset(name, configuration, 0)
    except Exception as error:  # assertions and whatever a value of the wrong type leads to
        raise InputError(
            f"Task 'reasoning_gym/{name}' refuses its parameters: {str(error) or type(error).__name__}."
        ) from error


def draw(name: str, configuration: str, seed: int, index: int) -> list[str | None]:
    """Return question and example answer, which some problems lack; if there is no problem, None and the reason."""
    try:
        entry = _entry(name, configuration, seed, index)
    except Exception as error:  # some generators give up on some seeds
        return [None, f"{type(error).__name__}: {error}"]
    answer = entry["answer"]
    if name in EVALUATED and not EVALUATED[name].fullmatch(answer.strip()):
        return [None, "its own answer is none that may be evaluated"]  # an integral that was left as it is
    return [entry["question"], answer]


def load(name: str, configuration: str, seed: int, index: int) -> None:
    """Make the problem, so that the time of a score is that of the scoring alone."""
    _entry(name, configuration, seed, index)


def score(name: str, configuration: str, seed: int, index: int, answer: str) -> float:
    """Return the score in [0, 1] of an answer; 0 if its scorer fails."""
    global _guarded
    entry, dataset = _entry(name, configuration, seed, index), _dataset(name, configuration, seed)
    if name in EVALUATED and not EVALUATED[name].fullmatch(answer):
        return 0.0
    _guarded = name not in EVALUATED
    try:
        value = float(dataset.score_answer(answer, entry))
    except Exception:  # scorers raise on what they cannot read; MemoryError and RecursionError are among these
        return 0.0
    finally:
        _guarded = False
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def reply(message: list[Any]) -> Any:
    """Return what the function named first in the message returns, or {"refused": why} if it raises InputError."""
    function, *arguments = message
    functions: dict[str, Callable[..., Any]] = {"check": check, "draw": draw, "load": load, "score": score}
    try:
        return functions[function](*arguments)
    except InputError as error:
        return {"refused": str(error)}


def main() -> None:
    """Draw and score until the input ends."""
    import reasoning_gym  # noqa: F401  (slow; before the clock starts)

    sys.addaudithook(_guard)
    serve(reply, MEMORY)
