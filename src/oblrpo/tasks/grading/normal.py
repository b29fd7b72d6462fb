"""One spelling for the many of LaTeX, and the parts of an answer: lists, brackets, words, units."""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00b0": r"^\circ ",
        "\u00b1": r"\pm ",
        "\u00b2": "^2 ",
        "\u00b3": "^3 ",
        "\u00b7": r"\cdot ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u222a": r"\cup ",
    }
)
_FUNCTIONS = "(?:arc|a)?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|ln|log|max|min|gcd"
_SUBSTITUTIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\!\s*", ""),  # before the spaces: `20,\! 160` is one number
        (r"\\[$]|[$]|\u20ac|\u00a3", " "),
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~", " "),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])\.?", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (rf"\\(?:operatorname|mathrm|text)\*?\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1"),
        (r"\\(?:mbox|text(?:bf|it|rm|normal|tt|sf)|math(?:rm|bf|it|sf|tt)|operatorname)(?![A-Za-z])\s*", r"\\text"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\^\s*\{\s*\\circ\s*\}|\\degrees?(?![A-Za-z])|\^\s*\\circ", r"^\\circ"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\{,\}", ","),
        # Greek and functions that programs write without a backslash, numpy's among them
        (r"\bnp\.", ""),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi|infty|sqrt)(?![A-Za-z])", r"\\\1"),
        (r"\\a(sin|cos|tan)(?![A-Za-z])", r"\\arc\1"),
        # sympy writes f{\left(x \right)}
        (r"(?<![A-Za-z\\])([A-Za-z])\s*\{\s*(\([^(){}]*\))\s*\}", r"\1\2"),
        (r"\s+", " "),
    ]
]
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])")
_AND = re.compile(r"\\text\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d})!])(?:\s*\\text\{([^{}]*)\}|\s((?:[A-Za-z/]{2,20} ?){1,3})|\s*\^\\circ ?[CF]?)\s*(?:\^\{?(\d)\}?)?$"
)

# Words after a number that change the value, or make it another statement: not units.
NOT_UNITS = frozenset(
    """
    hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens half halves
    third thirds quarter quarters fourth fourths fifth fifths tenth tenths percent and or to if for when where mod not
    more less greater than least most minus plus times over is are equals approximately undefined base
    """.split()  # noqa: SIM905  (a list of eighty literals is no easier to read)
)
_MEASURES = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mg milligram",
        "g gram",
        "kg kilogram",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year yr",
        "cent",
        "dollar",
        "degree deg",
        "radian rad",
        "km/h kph kmh",
        "mph",
        "l liter litre",
        "ml milliliter millilitre",
        "unit",
    )
    for name in names.split()
}


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    """Return the text with one spelling for fractions, spaces, delimiters and functions, where there are many."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip()
    while wrapped := _wrapping(text):
        text = text[wrapped:-1].strip()
    return text


def _wrapping(text: str) -> int:
    r"""Return the length of what opens around the whole text: `{`, or `\text{` (`\textbf{`) around a number; else 0."""
    if text.startswith("{") and closes(text) == len(text) - 1:
        return 1
    opening = len(r"\text{")
    whole = text.startswith(r"\text{") and closes(text[opening - 1 :]) == len(text) - opening
    return opening if whole and re.fullmatch(r"[-+()\d., ]*\d[-+()\d., ]*", text[opening:-1]) else 0


@lru_cache(maxsize=4096)
def key(text: str) -> str:
    """Return a text that is the same for tidy texts that differ only in spaces and needless braces."""
    text = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", "\\1\0", text)
    text = re.sub(r"(?<=\d) (?=\d)", "\0", text)
    text = text.replace(" ", "").replace("\0", " ")
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


def closes(text: str) -> int:
    """Return where the bracket that opens `text` is closed, whatever its kind; -1 if nowhere."""
    return next((place for place, level in enumerate(levels(text)) if level == 0), -1)


def levels(text: str) -> Iterator[int]:
    """Yield how many brackets are open after each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)


def split_top(text: str, separator: str, *, thousands: bool = False) -> list[str]:
    """Return the parts between separators outside all brackets; with `thousands`, `1,234` is one number there."""
    parts, start, place, level = [], 0, 0, 0
    while place < len(text):
        character = text[place]
        number = None
        if thousands and level == 0 and character.isdigit() and (place == 0 or text[place - 1] not in "0123456789.,"):
            number = _THOUSANDS.match(text, place)
        if number:
            place = number.end()
            continue
        level += (character in "([{") - (character in ")]}")
        if level == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            place = start = place + len(separator)
            continue
        place += 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def listed(text: str, *, thousands: bool) -> list[str]:
    r"""Return the items of `1, 2 and 3`, with `a \pm b` as two items; one item if it is no list."""
    text = _AND.sub(",", text).replace(";", ",")
    items = []
    for item in split_top(text, ",", thousands=thousands):
        # In `(1 \pm 2, 3)` the sign belongs to an item of that group.
        grouped = item.startswith(("(", "[", r"\{")) and closes(item.removeprefix("\\")) >= len(item) - 2
        signs = ("+", "-") if item.count(r"\pm") == 1 and not grouped else ("",)
        items += [item.replace(r"\pm", sign) if sign else item for sign in signs]
    return [item.strip().removeprefix("+").strip() for item in items]


def worded(text: str) -> str | None:
    r"""Return the words of an answer that is only words, such as `\text{(C)}` or `east`, in lower case; else None."""
    plain = _TEXT.sub(r" \1 ", text)
    letter = re.fullmatch(r"\(?\s*([A-Z])\s*\)?\.?", plain.strip())
    if letter and (plain != text or "(" in plain):
        return letter[1].lower()
    if re.fullmatch(r"[A-Za-z][A-Za-z' -]+", plain.strip()) and (plain != text or len(plain.strip()) > 3):
        return " ".join(plain.casefold().split())
    return None


def without_unit(text: str) -> tuple[str, str]:
    r"""Return the text without the unit after its number, and the unit if it is a measure (`cm^2`), else "".

    In \text{} any words are a unit but those of `NOT_UNITS`; outside, where `2 xy` is a product, measures alone.
    """
    unit = _UNIT.search(text)
    if not unit:
        return text, ""
    if unit[1] is None and unit[2] is None:
        return text[: unit.start()].strip(), "degree"
    words, power = (unit[1] if unit[1] is not None else unit[2]).strip().rstrip("."), unit[3] or ""
    if inner := re.fullmatch(r"(.*[A-Za-z]) ?\^\{?(\d)\}?", words):
        words, power = inner[1], inner[2]
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if words.startswith(prefix):
            words, power = words.removeprefix(prefix), exponent
    words = words.casefold()
    measure = _MEASURES.get(words) or _MEASURES.get(words.removesuffix("s")) or ""
    plain = re.fullmatch(r"[a-z][a-z .'/-]+", words) and not NOT_UNITS.intersection(re.split(r"[ .'/-]", words))
    if not measure and (unit[1] is None or not plain):
        return text, ""
    return text[: unit.start()].strip(), measure + (f"^{power}" if measure and power else "")
