"""The value of an arithmetic expression, safe on any text: + - * / and parentheses over whole numbers."""

import ast
import operator
import re
from fractions import Fraction
from itertools import accumulate

MAX_LENGTH, MAX_DEPTH = 200, 20
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
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
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = value(node.left), value(node.right)
            return Fraction(OPERATORS[type(node.op)](left, right))
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
