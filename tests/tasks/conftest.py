"""Shared by the tests of the tasks: hostile completions, drawn problems with demonstrations, and the verifier."""

import random
from collections.abc import Callable, Iterator

import pytest

from oblrpo.tasks import Demonstrator, Problem
from oblrpo.tasks.grading import MathVerifier

HOSTILE = {
    "empty": "",
    "space": " \n\t ",
    "nested": "(" * 100_000,
    "nested_short": "(" * 95 + "1" + ")" * 95,
    "huge_number": "9" * 1_000_000,
    "huge_power": "9**9**9**9",
    "huge_product": "*".join(["99999999"] * 100_000),
    "unicode_digits": "\u0663*\u0665+\u0667",
    "superscript": "3\u00b25",
    "fullwidth": "\uff13*\uff15",
    "null": "3*5+7\x00",
    "control": "\x1b[2J\x07\x00",
    "surrogate": "\ud800",
    "division_by_zero": "1/0",
    "code": "__import__('os').system('true')",
    "format": "{0.__class__}",
    "commas": "," * 1_000_000,
    "equals": "=" * 1_000_000,
    "thousands": "1,111" * 200_000,
    "letters": "ab" * 500_000,
    "underscore_digits": "1_0",
    "exponent": "1e999999999",
    "minus": "-" * 1_000_000,
    "not_a_number": "nan",
}


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def demonstrated() -> Callable[..., Iterator[tuple[Problem, str]]]:
    """Return a function that yields training problems of one step, each with one demonstration."""

    def demonstrated(task: Demonstrator, count: int, noise: float = 0.0) -> Iterator[tuple[Problem, str]]:
        rng = random.Random(5)
        for problem in task.train_batch(0, count):
            yield problem, task.demonstration(problem, rng, noise)

    return demonstrated


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    pytest.importorskip("math_verify")
    with MathVerifier(seconds=20) as verifier:
        yield verifier
