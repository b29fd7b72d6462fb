"""Whether an answer equals the gold answer: structure and numbers are compared here, formulas by a function given."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from oblrpo.tasks.grading.names import assigned, named, numeric, same_function, several_letters, without_domains
from oblrpo.tasks.grading.normal import closes, in_any_order, key, listed, relational, split_top, tidy, top
from oblrpo.tasks.grading.number import number, same_number
from oblrpo.tasks.grading.units import Unit, ratio, without_unit
from oblrpo.tasks.grading.words import choice, choices, moment, worded

Algebra = Callable[[str, str], bool]
"""Returns whether two tidy formulas (gold, answer) are equal; it may raise `NeedsAlgebra` if it cannot tell."""

_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|cases)\}(.*)\\end\{\1\}", re.DOTALL)
_IF = re.compile(r"(?:\\text\{\s*)?(?:if|for|when)\s*\}?")
_MOD = re.compile(r"\(?(?:\\text\{ ?)?\(?\\?[pb]?mod(?![A-Za-z])\s*\}?")
_BASE = re.compile(r"\(?(\d+|[0-9A-F]+(?=\)?_\{?\(?1[1-6]))\)?_\{?\(?(\d+)\)?\}?")
_COMMA = re.compile(r"(?:-?\d+,(?:\d{1,2}|\d{4,})|-?0,\d+)(?:[^\d,;][^\d,;]*)?")
_LETTERS = re.compile(r"(?<=[\d.)}])\s*[A-Za-z]{1,2}(?:\^\{?\d\}?)?(?:/[A-Za-z]{1,2}(?:\^\{?\d\}?)?)?$")
_CONSTANT = re.compile(r"\+ ?(?:[cCkK]|\\text\{ ?(?:C|const(?:ant)?)\.? ?\})$")


class NeedsAlgebra(Exception):  # noqa: N818  (a reply, not an error)
    """Only computer algebra can tell whether the formulas are equal."""


class Group(NamedTuple):
    """A structured answer: its kind, its items, and whether their order counts."""

    kind: str
    items: list[str]
    ordered: bool


def equal(golds: Sequence[str], answer: str, algebra: Algebra) -> bool:
    """Return whether the answer is the gold answer, or of several lists each once and no other; `algebra` may raise."""
    if len(golds) == 1:
        return _same(tidy(golds[0]), tidy(answer), algebra)
    wanted = [tidy(gold) for gold in golds]
    text = tidy(answer)
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    same = partial(_same, algebra=algebra)
    # `100,200` may be one number or two; as two, it must be these two.
    return any(in_any_order(wanted, listed(inner, thousands=thousands), same) for thousands in (True, False))


def _same(gold: str, answer: str, algebra: Algebra) -> bool:
    if not answer or not gold:
        return False
    if key(gold) == key(answer):
        return True
    based, other_base = _BASE.fullmatch(key(gold)), _BASE.fullmatch(key(answer))
    if based:  # the base may be missing, as a unit may: the question names it
        return based.groups() == (other_base.groups() if other_base else (key(answer), based[2]))
    if other_base:
        return False
    wanted = number(gold)
    decimal = wanted is not None and wanted.decimal and _COMMA.fullmatch(answer)
    if decimal or (gold.startswith("0,") and _COMMA.fullmatch(gold)):  # a decimal comma
        gold, answer = gold.replace(",", "."), answer.replace(",", ".")
    if re.search(r"\+ ?C$", gold) and _CONSTANT.search(answer):  # of an integral, by any name
        gold, answer = (_CONSTANT.sub("+ C", text) for text in (gold, answer))
    for verdict in (_same_words(gold, answer, algebra), _same_residue(gold, answer)):
        if verdict is not None:
            return verdict
    if (pair := without_domains(gold, answer)) is None:
        return False
    gold, answer = pair
    if relational(gold) or relational(answer):
        wanted_set, given_set = (
            (split_top(named(text)[1], "=") or [text])[-1] if "=" in top(text) else text for text in (gold, answer)
        )
        named_set = (wanted_set, given_set) != (gold, answer)
        return _same(wanted_set, given_set, algebra) if named_set else algebra(gold, answer)
    wanted_by_name, given_by_name = assigned(gold), assigned(answer)
    if wanted_by_name or given_by_name:
        return _same_values(wanted_by_name or gold, given_by_name or answer, algebra)
    return _same_named(gold, answer, algebra)


def _same_words(gold: str, answer: str, algebra: Algebra) -> bool | None:
    """Compare letters of multiple choice, dates, times of day and words; None if the gold answer is none of these."""
    one, other = choice(gold), choice(answer)
    if (letters := choices(gold)) or (one and choices(answer)):
        return letters == choices(answer)
    if one and other:
        return one[0] == other[0] and (not one[1] or not other[1] or _same(one[1], other[1], algebra))
    if (one or other or ("", ""))[1]:  # the value of the option alone
        return _same(one[1] if one else gold, other[1] if other else answer, algebra)
    colons = gold.count(":") != answer.count(":")  # else it may be a ratio
    if (time := moment(gold)) and (other_time := moment(answer)) and (colons or re.search("[A-Za-z]", gold + answer)):
        return time == other_time
    words = worded(gold)
    return None if words is None else words == (worded(answer) or answer.casefold())


def _same_residue(gold: str, answer: str) -> bool | None:
    r"""Compare `x \equiv 3 \pmod 7` with `10 \pmod 7`; None if neither is a residue."""
    if not _MOD.search(gold) and not _MOD.search(answer):
        return None
    residues = []
    for text in (gold, answer):
        residue, _, modulus = _MOD.sub("\0", text).partition("\0")
        name, _, value = residue.rpartition(r"\equiv")
        values, base = [number(item) for item in listed(value, thousands=True)], number(modulus.strip("{() }"))
        if not base or base.value < 1 or not all(values):
            return False
        residues.append((key(name), base.value, {item.value % base.value for item in values if item}))
    (name, *wanted), (other, *given) = residues
    return wanted == given and (name == other or not name or not other)


def _same_values(gold: dict[str, str] | str, answer: dict[str, str] | str, algebra: Algebra) -> bool:
    """Compare values with names; with a list or tuple without, in its order, but for names such as x_1 and x_2."""
    if isinstance(gold, dict) and isinstance(answer, dict):
        return gold.keys() == answer.keys() and all(_same(gold[name], answer[name], algebra) for name in gold)
    names, other = (gold, answer) if isinstance(gold, dict) else (answer, gold)
    group = _group(str(other))
    if not group or group.kind not in {"set", "()"} or isinstance(names, str):
        return False
    others, items = zip(*map(named, group.items), strict=True)
    letters = {name.partition("_")[0] for name in names}
    numbered = letters in [{"x"}, {"z"}]  # roots
    if not set(others) <= {"", *(letters if numbered else ())}:
        return False
    wanted, given = (list(side) for side in ((names.values(), items) if names is gold else (items, names.values())))
    if numbered:
        return in_any_order(wanted, given, partial(_same, algebra=algebra))
    return len(wanted) == len(given) and all(_same(*pair, algebra) for pair in zip(wanted, given, strict=True))


def _same_named(gold: str, answer: str, algebra: Algebra) -> bool:
    r"""Compare without `x =` or `x \in` if one alone has a name, or both have the same; else as equations."""
    (gold_name, gold_value), (name, value) = named(gold), named(answer)
    equations = ["=" in top(text) and len(listed(text, thousands=True)) == 1 for text in (gold, answer)]
    if gold_name and name and gold_name != name:
        changed = same_function(gold_name, name, value)
        return algebra(gold, answer) if changed is None else _same(gold_value, changed, algebra)
    if all(equations) and not (gold_name and name):
        return algebra(gold, answer)
    if (equations[0] and not gold_name) or re.search(r"\^\{?\d", gold_name):  # a curve is more than its right side
        return numeric(gold) and _same_chain(gold, answer, algebra)
    if equations[1] and not name:
        return _same_chain(answer, gold, algebra)
    for chain, other in ((gold_value, value), (value, gold_value)):
        if "=" in top(chain) and len(listed(chain, thousands=True)) == 1:
            return _same_chain(chain, other, algebra)
    wanted, given = _group(gold_value), _group(value)
    if wanted or given:
        groups = (wanted or Group("set", [gold_value], False), given or Group("set", [value], False))
        return _same_groups(*groups, algebra) or ("matrix}" in gold + answer and algebra(gold_value, value))
    return _same_scalars(gold_value, value, algebra)


def _same_chain(chain: str, other: str, algebra: Algebra) -> bool:
    r"""Return whether the last side of `3 \times 4 = 12` or `a + b = 12` is the other; the rest must fit."""
    *before, last = split_top(chain, "=") or [""]
    if not all(several_letters(side) or _same(side, last, algebra) for side in before):
        return False
    return _same(other, last, algebra)


def _same_scalars(gold: str, answer: str, algebra: Algebra) -> bool:
    gold, unit = without_unit(gold) if number(gold) is None else (gold, Unit())
    if unit or ("/" in answer and number(gold)):  # beside metres `5m` is no product, nor is `5m/s` beside a number
        answer = _LETTERS.sub(r"\\text{\g<0>}", answer)
    answer, other = without_unit(answer) if number(answer) is None else (answer, Unit())
    degrees = [powers == (("deg", 1),) for powers in (unit.powers, other.powers)]
    radians = r"\pi" in (answer if degrees[0] else gold) or (("rad", 1),) in {unit.powers, other.powers}
    if radians and degrees[0] != degrees[1] and {unit.powers, other.powers} <= {(("deg", 1),), (("rad", 1),), ()}:
        sides = zip((gold, answer), degrees, strict=True)
        return algebra(*(rf"({text}) \cdot \frac{{\pi}}{{180}}" if degree else text for text, degree in sides))
    size = ratio(unit, other)
    if size is None:
        return False
    if size != 1:
        answer = rf"({answer}) \cdot \frac{{{size.numerator}}}{{{size.denominator}}}"
    wanted, given = number(gold), number(answer)
    if wanted and given:
        return same_number(wanted, given) and (wanted.percent == given.percent or not (unit or other))
    if not gold or not answer or worded(answer) is not None:
        return False
    return key(gold) == key(answer) or algebra(gold, answer)


def _group(text: str) -> Group | None:
    """Return the structure of a list, tuple, interval, set, union or matrix; None for anything else."""
    if matrix := _MATRIX.fullmatch(text) or _MATRIX.fullmatch(text[1:-1].strip()):  # or in brackets of its own
        rows = [[cell.strip() for cell in row.split("&")] for row in matrix[2].split(r"\\") if row.strip()]
        if matrix[1] == "cases":
            lines = [", ".join(_IF.sub("", cell).strip(" ,") for cell in row) for row in rows]
            return Group("cases", [f"({line})" for line in lines], False)
        return Group(f"matrix {len(rows)} {[len(row) for row in rows]}", [cell for row in rows for cell in row], True)
    items = listed(text, thousands=True)
    if len(items) > 1 and not ("=" in text and any(word in text for word in ("where", "for"))):
        return Group("set", items, False)
    if text.startswith(r"\{") and text.endswith(r"\}") and closes(text[1:]) == len(text) - 2:
        items = listed(text[2:-2], thousands=False)
        return (_group(items[0]) if len(items) == 1 else None) or Group("set", items, False)
    if text[:1] in {"(", "["} and text[-1:] in {")", "]"} and closes(text) == len(text) - 1:
        items = split_top(text[1:-1], ",") if "," in text else split_top(text[1:-1], ";")
        if len(items) > 1:
            return Group(text[0] + text[-1], items, True)
    if len(parts := split_top(text, ":")) > 1:
        return Group("ratio", parts, True)
    return None


def _same_groups(gold: Group, answer: Group, algebra: Algebra) -> bool:
    if gold.kind == "ratio" and all(map(str.isdecimal, gold.items)) and math.gcd(*map(int, gold.items)) > 1:
        # `10:45` is a time; a ratio would be in lowest terms.
        return gold.kind == answer.kind and list(map(number, gold.items)) == list(map(number, answer.items))
    if {gold.kind, answer.kind} == {"ratio", "set"}:  # `7:32` and the one number \frac{7}{32}
        both = (gold.items, answer.items)
        sides = [items[0] if len(items) == 1 else rf"\frac{{{items[0]}}}{{{items[1]}}}" for items in both]
        return {len(gold.items), len(answer.items)} == {1, 2} and algebra(*sides)
    if gold.kind != answer.kind:
        return False
    if not gold.ordered:
        return in_any_order(gold.items, answer.items, partial(_same, algebra=algebra))
    same_length = len(gold.items) == len(answer.items)
    if gold.kind == "ratio" and not any(item.startswith("0") for item in gold.items + answer.items):  # no time of day
        (first, *rest), (other, *others) = gold.items, answer.items
        crossed = [(rf"({a}) \cdot ({other})", rf"({b}) \cdot ({first})") for a, b in zip(rest, others, strict=False)]
        return same_length and all(algebra(*pair) for pair in crossed)
    return same_length and all(_same(*pair, algebra) for pair in zip(gold.items, answer.items, strict=True))
