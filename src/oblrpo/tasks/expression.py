"""A small arithmetic parser that is safe on any text: + - * / and parentheses over whole numbers."""

import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 20
_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")
_TEXT = re.compile(r"(?:0|[1-9][0-9]*|[-+*/() ])*")


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression and the numbers it uses, in order.

    Numbers are ASCII digits without sign or leading zero.

    Raises:
        ValueError: not such an expression, a division by zero, or longer or deeper than the limits.
    """
    if len(text) > MAX_LENGTH or not _TEXT.fullmatch(text):
        raise ValueError("too long, or characters that are not arithmetic")
    parser = _Parser(_TOKEN.findall(text))
    value = parser.sum(depth=0)
    if parser.peek():
        raise ValueError(f"unexpected {parser.peek()!r}")
    return value, parser.numbers


class _Parser:
    """Recursive descent over tokens: sum = product {+- product}, product = atom {*/ atom}."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.numbers: list[int] = []

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.peek() in ("*", "/"):
            operator, factor = self.take(), self.atom(depth)
            if operator == "/" and factor == 0:
                raise ValueError("division by zero")
            value = value * factor if operator == "*" else value / factor
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "(":
            return self.parenthesis(depth + 1)
        if not token.isdigit():
            raise ValueError(f"a number expected, got {token!r}")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])

    def parenthesis(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        value = self.sum(depth)
        if self.take() != ")":
            raise ValueError("a closing parenthesis expected")
        return value
