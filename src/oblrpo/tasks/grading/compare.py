"""Whether an answer equals the gold answer: structure and numbers are compared here, formulas by a function given."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from oblrpo.tasks.grading.normal import closes, key, listed, split_top, tidy, without_unit, worded
from oblrpo.tasks.grading.number import number, same_number

Algebra = Callable[[str, str], bool]
"""Returns whether two tidy formulas (gold, answer) are equal; it may raise `NeedsAlgebra` if it cannot tell."""

_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_NAME = re.compile(
    r"\([A-Za-z]( ?, ?[A-Za-z]){1,3}\)|[A-Za-z\\][A-Za-z0-9\\{}_^ ,']{0,40}(?:\([A-Za-z0-9\\ ,_{}]{1,20}\))?"
)
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_BASE = re.compile(r"(\d+)_\{?\d+\}?|([0-9A-F]+)_\{?1[1-6]\}?")


class NeedsAlgebra(Exception):  # noqa: N818  (a reply, not an error)
    """Only computer algebra can tell whether the formulas are equal."""


class Group(NamedTuple):
    """A structured answer: its kind, its items, and whether their order counts."""

    kind: str
    items: list[str]
    ordered: bool


def equal(golds: Sequence[str], answer: str, algebra: Algebra) -> bool:
    """Return whether the answer is the gold answer; for several golds, whether it lists each once and nothing else.

    Whatever `algebra` raises passes through.
    """
    if len(golds) == 1:
        return _same(tidy(golds[0]), tidy(answer), algebra)
    wanted = [tidy(gold) for gold in golds]
    text = tidy(answer)
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    # `100,200` may be one number or two; as two, it must be these two.
    return any(_match(wanted, listed(inner, thousands=whole), algebra) for whole in (True, False))


def _same(gold: str, answer: str, algebra: Algebra) -> bool:
    if not answer or not gold:
        return False
    if key(gold) == key(answer):
        return True
    if based := _BASE.fullmatch(key(gold)):  # the base may be missing, as a unit may: the question names it
        return key(answer) == based[1]
    if _BASE.fullmatch(key(answer)):
        return False
    words = worded(gold)
    if words is not None:
        return words == (worded(answer) or answer.casefold())
    gold, answer = _without_names(gold, answer)
    wanted, given = _group(gold), _group(answer)
    if wanted or given:
        return _same_groups(wanted or Group("set", [gold], False), given or Group("set", [answer], False), algebra)
    return _same_scalars(gold, answer, algebra)


def _same_scalars(gold: str, answer: str, algebra: Algebra) -> bool:
    gold_number, answer_number = number(gold), number(answer)
    if gold_number is None or answer_number is None:
        gold, gold_unit = without_unit(gold) if gold_number is None else (gold, "")
        answer, answer_unit = without_unit(answer) if answer_number is None else (answer, "")
        if gold_unit and answer_unit and gold_unit != answer_unit:
            return False
        if r"\pi" in (answer if gold_unit == "degree" else gold) and {gold_unit, answer_unit} == {"degree", ""}:
            return algebra(_radians(gold, gold_unit), _radians(answer, answer_unit))
        gold_number, answer_number = number(gold), number(answer)
    if gold_number is not None and answer_number is not None:
        return same_number(gold_number, answer_number)
    if not gold or not answer or worded(answer) is not None:
        return False
    return key(gold) == key(answer) or algebra(gold, answer)


def _radians(text: str, unit: str) -> str:
    return rf"({text}) \cdot \frac{{\pi}}{{180}}" if unit else text


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    r"""Return both without `x =` or `x \in` if only one of them has a name, or both have the same."""
    (gold_name, gold_value), (name, value) = _named(gold), _named(answer)
    if gold_name == name or not gold_name or not name:
        return gold_value, value
    return gold, answer


def _named(text: str) -> tuple[str, str]:
    """Return the name and the value of `name = value` (of a chain, the last value), or "" and the text."""
    if len(listed(text, thousands=True)) > 1:  # the items of a list have names of their own
        return "", text
    if r"\in " in text or r"\in[" in text or r"\in(" in text:
        name, _, value = text.partition(r"\in")
        if _NAME.fullmatch(name.strip()):
            return key(name.strip()), value.strip()
    parts = _EQUALS.split(text)
    if len(parts) > 1 and _NAME.fullmatch(parts[0].strip()) and parts[-1].strip():
        return key(parts[0].strip()), parts[-1].strip()
    return "", text


def _group(text: str) -> Group | None:
    """Return the structure of a list, tuple, interval, set, union or matrix; None for anything else."""
    if matrix := _MATRIX.fullmatch(text) or _MATRIX.fullmatch(text[1:-1].strip()):  # or in brackets of its own
        rows = [[cell.strip() for cell in row.split("&")] for row in matrix[2].split(r"\\") if row.strip()]
        return Group(f"matrix {len(rows)} {[len(row) for row in rows]}", [cell for row in rows for cell in row], True)
    pieces = split_top(text, r"\cup")
    if len(pieces) > 1:
        return Group("union", pieces, False)
    items = listed(text, thousands=True)
    if len(items) > 1 and not ("=" in text and any(word in text for word in ("where", "for"))):
        return Group("set", items, False)
    if text.startswith(r"\{") and text.endswith(r"\}") and closes(text[1:]) == len(text) - 2:
        return Group("set", listed(text[2:-2], thousands=False), False)
    if text[:1] in {"(", "["} and text[-1:] in {")", "]"} and closes(text) == len(text) - 1:
        items = split_top(text[1:-1], ",")
        if len(items) > 1:
            return Group(text[0] + text[-1], items, True)
    return None


def _same_groups(gold: Group, answer: Group, algebra: Algebra) -> bool:
    if gold.kind != answer.kind:
        return False
    if not gold.ordered:
        return _match(gold.items, answer.items, algebra)
    same_length = len(gold.items) == len(answer.items)
    return same_length and all(_same(*pair, algebra) for pair in zip(gold.items, answer.items, strict=True))


def _match(golds: list[str], answers: list[str], algebra: Algebra) -> bool:
    """Return whether the answers are the golds in any order; equality is transitive, so the first match will do."""
    if len(golds) != len(answers):
        return False
    left = list(answers)
    for gold in golds:
        equal_one = next((answer for answer in left if _same(gold, answer, algebra)), None)
        if equal_one is None:
            return False
        left.remove(equal_one)
    return True
