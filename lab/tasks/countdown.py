"""Reach a target with every given number used once: `3,5,7>22=` -> `3*5+7` or `3*5=15,15+7=22`."""

import ast
import operator as arithmetic
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, permutations
from typing import NamedTuple, TypeVar

from oblrpo.tasks import GeneratedTask, Problem
from oblrpo.tasks.task import check_whole

LARGEST_TARGET = 99
CALCULATE = {"+": arithmetic.add, "-": arithmetic.sub, "*": arithmetic.mul}
OPERATORS = "".join(CALCULATE)
STYLES = ("steps", "plain", "parentheses")
Step = tuple[str, int, int]  # operator and the places, in what is left, of its two operands
Plan = tuple[Step, ...]
T = TypeVar("T")


class Term(NamedTuple):
    """A value with its text and outermost operator ("" for a single number)."""

    value: int
    text: str
    operator: str = ""


class CountdownTask(GeneratedTask):
    """Combine `count` numbers of 1 to `largest` with + - * (and exact /) into a target of 1 to 99.

    A completion is an expression, or steps `A=v,B=w,...` in which a later step may use an earlier value
    in place of the numbers that went into it. The answer of a problem is its prompt without the `=`.
    """

    name = "countdown"

    def __init__(self, seed: int = 0, count: int = 3, largest: int = 9) -> None:
        """Set the seed, how many numbers (2 to 4) and how large they get (5 to 50)."""
        super().__init__(seed)
        self.count = check_whole("Task 'countdown': count", count, 2, 4)
        self.largest = check_whole("Task 'countdown': largest", largest, 5, 50)

    def draw(self, rng: random.Random) -> Problem:
        """Return random numbers with the value of a random plan on them as target."""
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(self.count)]
            target = follow(numbers, random_plan(self.count, rng), "plain")[0]
            if 1 <= target <= LARGEST_TARGET:
                question = f"{','.join(map(str, numbers))}>{target}"
                return Problem(question + "=", question)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the expression, or every step, is right and each number is used exactly once."""
        numbers, target = parse_question(problem.answer)
        return float(len(completion) <= MAX_LENGTH and reaches(numbers, target, completion.strip()))

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return a random solution in a random style; a wrong step takes another operator."""
        numbers, target = parse_question(problem.answer)
        plan = rng.choice(plans(tuple(numbers), target))
        return follow(numbers, blur(plan, rng, noise), rng.choice(STYLES))[1]


def parse_question(question: str) -> tuple[list[int], int]:
    """Return the numbers and the target of `3,5,7>22`."""
    numbers, _, target = question.partition(">")
    return [int(number) for number in numbers.split(",")], int(target)


def reaches(numbers: Sequence[int], target: int, text: str) -> bool:
    """Return whether `text` turns all the numbers, each used once, into the target without an error."""
    left = list(numbers)
    *steps, last = text.split(",")
    try:
        for step in steps:
            expression, claim = step.split("=")
            value = spend(expression, left)
            if value.denominator != 1 or claim.strip() != str(value):
                return False
            left.append(int(value))
        expression, *claims = last.split("=")
        value = spend(expression, left)
    except ValueError:  # not arithmetic, not one `=` in a step, or a number that is not left
        return False
    return not left and value == target and [claim.strip() for claim in claims] in ([], [str(target)])


def spend(expression: str, left: list[int]) -> Fraction:
    """Return the value of the expression, and remove its numbers from `left`; ValueError if one is not there."""
    value, used = evaluate(expression)
    for number in used:
        left.remove(number)
    return value


@lru_cache(maxsize=1 << 14)  # most of the work is in the same few small values again and again
def plans(values: tuple[int, ...], target: int) -> tuple[Plan, ...]:
    """Return every order of combining all the values into the target without negative numbers."""
    if len(values) == 1:
        return ((),) if values[0] == target else ()
    ways: list[Plan] = []
    for i, j in permutations(range(len(values)), 2):
        left = without(values, i, j)
        for operator in OPERATORS:
            if operator != "-" or values[i] >= values[j]:
                rests = plans((*left, CALCULATE[operator](values[i], values[j])), target)
                ways.extend(((operator, i, j), *rest) for rest in rests)
    return tuple(ways)


def random_plan(count: int, rng: random.Random) -> Plan:
    """Return one random order of combining `count` numbers into one."""
    steps = []
    for size in range(count, 1, -1):
        i, j = rng.sample(range(size), 2)
        steps.append((rng.choice(OPERATORS), i, j))
    return tuple(steps)


def blur(plan: Plan, rng: random.Random, noise: float) -> Plan:
    """Return the plan with each operator replaced by another one with probability `noise`."""
    return tuple(
        (rng.choice(OPERATORS.replace(operator, "")) if rng.random() < noise else operator, i, j)
        for operator, i, j in plan
    )


def follow(numbers: Sequence[int], plan: Plan, style: str) -> tuple[int, str]:
    """Return the value the plan arrives at and its text in the given style."""
    left = [Term(number, str(number)) for number in numbers]
    lines = []
    for operator, i, j in plan:
        term = combine(operator, left[i], left[j], always=style == "parentheses")
        lines.append(f"{term.text}={term.value}")
        if style == "steps":
            term = Term(term.value, str(term.value))
        left = [*without(left, i, j), term]
    return left[0].value, ",".join(lines) if style == "steps" else left[0].text


def combine(operator: str, first: Term, second: Term, *, always: bool) -> Term:
    """Return `first operator second`, in parentheses where needed or `always`; a difference is larger - smaller."""
    if operator == "-" and first.value < second.value:
        first, second = second, first
    left, right = first.text, second.text
    if first.operator and (always or (operator == "*" and first.operator in "+-")):
        left = f"({left})"
    if second.operator and (always or (operator in "*-" and second.operator in "+-")):
        right = f"({right})"
    return Term(CALCULATE[operator](first.value, second.value), f"{left}{operator}{right}", operator)


def without(items: Sequence[T], i: int, j: int) -> list[T]:
    """Return the items except those at places i and j."""
    return [item for place, item in enumerate(items) if place not in (i, j)]


MAX_LENGTH, MAX_DEPTH = 200, 20
ARITHMETIC = {ast.Add: arithmetic.add, ast.Sub: arithmetic.sub, ast.Mult: arithmetic.mul, ast.Div: arithmetic.truediv}
"""Of expressions, which are safe to evaluate on any text: parentheses and these, over whole numbers."""
# Nothing but this reaches Python's parser, and nothing is ever executed.
_TEXT = re.compile(r"(?:0(?![0-9])|[1-9][0-9]*|[-+*/() ])*")


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression and the numbers it uses, in order.

    Numbers are ASCII digits without sign or leading zero.

    Raises:
        ValueError: not such an expression, a division by zero, or longer or deeper than the limits.
    """
    if len(text) > MAX_LENGTH or not _TEXT.fullmatch(text):
        raise ValueError("too long, or characters that are not arithmetic")
    if max(accumulate((character == "(") - (character == ")") for character in text), default=0) > MAX_DEPTH:
        raise ValueError("too deep")
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right = value(node.left), value(node.right)
            return Fraction(ARITHMETIC[type(node.op)](left, right))
        if not isinstance(node, ast.Constant):
            raise ValueError(f"unexpected {type(node).__name__}")
        numbers.append(int(str(node.value)))
        return Fraction(numbers[-1])

    try:
        return value(ast.parse(text.strip(), mode="eval").body), numbers
    except SyntaxError:
        raise ValueError("an expression is expected") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
