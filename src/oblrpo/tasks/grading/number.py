"""Numbers as they are written in answers, read exactly."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# More digits than any answer has; they bound the cost of hostile text.
MAX_DIGITS = 400
MAX_EXPONENT = 2_000
# math-verify compares decimals at 6 places. Here these are at most 6 digits too, or 1e-9 would equal 2e-9.
TOLERANCE = Fraction(5, 10**7)
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_TEN = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d{1,4})))"
_DECIMAL = re.compile(rf"({_PLAIN})(?:[eE]([-+]?\d{{1,4}})|{_TEN})?", re.ASCII)
_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*(-?)\s*({_PLAIN})\s*\}}\s*\{{\s*(-?)\s*({_PLAIN})\s*\}}|()({_PLAIN})\s*/\s*()({_PLAIN})", re.ASCII
)
_MIXED = re.compile(r"(\d+)(?: (\d+)/(\d+)|\s*\\frac\{(\d+)\}\{(\d+)\})", re.ASCII)
_PERCENT = re.compile(r"\s*\\?%$|\s*(?:\\text\{\s*)?(?:percent(?:age)?|per cent|pct)(?:\s*\})?$")
# A decimal whose last digits go on: under a line or dots, in brackets, or twice before \ldots.
_REPEATING = re.compile(
    r"(\d*)\.(\d*?)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\)"
    r"|\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?|(\d{1,9}?)\9+\s*\\ldots)",
    re.ASCII,
)


@dataclass(frozen=True)
class Number:
    """A rational number, with whether it was written as a decimal, and whether a percent sign followed."""

    value: Fraction
    decimal: bool
    percent: bool


@lru_cache(maxsize=4096)
def number(text: str) -> Number | None:
    r"""Return the number that a tidy text is: `-1,234.5`, `4e21`, `\frac{1}{2}`, `1 1/2`, `8\%`, `0.\overline{3}`."""
    if len(text) > MAX_DIGITS:
        return None
    body = _PERCENT.sub("", text)
    percent = body != text
    sign = -1 if body.startswith("-") else 1
    body = body[1:].strip() if body[:1] in {"-", "+"} else body.strip()
    try:
        value = _value(body)
    except (ZeroDivisionError, ValueError):
        return None
    decimal = bool(re.search(r"\.|\d[eE]|10\s*\^", body)) and not _REPEATING.fullmatch(body)
    return None if value is None else Number(sign * value, decimal, percent)


def _value(body: str) -> Fraction | None:
    if match := _DECIMAL.fullmatch(body):
        exponent = int(match[2] or match[3] or match[4] or 0)
        return _plain(match[1]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if match := _FRACTION.fullmatch(body):
        minus, top, other, bottom = match.groups()[:4] if match[2] else match.groups()[4:]
        return (-1 if minus != other else 1) * _plain(top) / _plain(bottom)
    if match := _MIXED.fullmatch(body):
        units, top, bottom = map(int, filter(None, match.groups()))
        return units + Fraction(top, bottom) if top < bottom else None
    if match := _REPEATING.fullmatch(re.sub(r"\s*\\ldots$", r"\\ldots", body)):
        integer, first, *period = match.groups("")
        digits = "".join(period)
        nines = 10 ** len(digits) - 1
        return Fraction(int(integer + first + digits) - int("0" + integer + first), nines * 10 ** len(first))
    return None


def _plain(text: str) -> Fraction:
    return Fraction("0" + text.replace(",", "").rstrip("."))


def tolerance(gold: Fraction) -> Fraction:
    """Return half a unit of the sixth decimal place; for a gold answer below 0.1, of its sixth digit."""
    scale = Fraction(1)
    while scale / 10 > abs(gold) > 0:
        scale /= 10
    return TOLERANCE * scale if gold else Fraction(0)


def same_number(gold: Number, answer: Number) -> bool:
    """Return whether two numbers are equal: p% is p/100, and also p where the other states no percent sign.

    A gold of p accepts an answer of p% only above 1: `0.5%` is not what a gold of 0.5 means.
    """

    def close(wanted: Fraction, given: Fraction) -> bool:
        return wanted == given or (gold.decimal and abs(wanted - given) <= tolerance(wanted))

    as_written = close(gold.value, answer.value)
    if gold.percent == answer.percent:
        return as_written
    wanted, given = (number.value / 100 if number.percent else number.value for number in (gold, answer))
    return close(wanted, given) or (as_written and (gold.percent or abs(answer.value) > 1))
