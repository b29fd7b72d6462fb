"""Verifiers for reference answers in plain text. LaTeX is not understood."""

import re
from collections import deque
from decimal import Decimal

# More digits than any real answer has; they bound the cost of hostile text.
MAX_DIGITS = 60

# Thousands commas must group by three, so that `3,4` is two numbers.
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
# What stands before a negative number: `-5`, `-$5`, `$-5`, but not the operator in `10-5`.
_MINUS = re.compile(r"(?:^|[^\w)])[-\u2212]\$?$")


def exact(gold: str, completion: str) -> float:
    """Return 1.0 if the texts agree when every run of white space counts as one space, otherwise 0.0."""
    return float(gold.split() == completion.split())


def numeric(gold: str, completion: str) -> float:
    """Return 1.0 if the last numbers of both texts are equal, otherwise 0.0.

    Examples:
        >>> numeric("#### 1,234", "That makes $1234.00.")
        1.0
    """
    wanted = last_number(gold)
    return float(wanted is not None and wanted == last_number(completion))


def last_number(text: str) -> Decimal | None:
    """Return the last decimal number in the text; None if there is none or it has over MAX_DIGITS digits.

    Understood: sign, `$` before it, thousands commas, decimals. Not: exponents, fractions, units.
    """
    if len(text) <= MAX_DIGITS and text.isascii() and text.isdigit():  # most answers of most data
        return Decimal(text)
    found = deque(_NUMBER.finditer(text), maxlen=1)
    if not found or len(found[0][0]) > MAX_DIGITS:
        return None
    last = found[0]
    value = Decimal(last[0].replace(",", ""))
    return -value if _MINUS.search(text[max(0, last.start() - 3) : last.start()]) else value
