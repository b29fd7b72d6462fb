r"""Whether an answer equals the gold answer: structure and numbers are compared here, formulas by a function given.

Further down stand answers that are no formulas (words, letters of multiple choice, dates and times of day), and names
beside values: `x = 5`, `(k,n) = (45,2)`, `f(x) = 2x`, `n = 3k, k \in \mathbb{Z}`.
"""

import calendar
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from oblrpo.tasks.grading.normal import (
    AND,
    closes,
    in_any_order,
    key,
    listed,
    relational,
    split_top,
    tidy,
    top,
    unworded,
)
from oblrpo.tasks.grading.units import Unit, number, ratio, same_number, without_unit

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


# Letters of any script, with spaces, commas, full stops, hyphens and apostrophes between them.
_WORDS = re.compile(r"[^\W\d_]+(?:(?:[ ,.]+|['-])[^\W\d_]+)*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "all", "max", "min", "up", "dne"})
_SAME_WORDS = {"dne": "does not exist", "doesn t exist": "does not exist", "limit does not exist": "does not exist"}
_OPTION = "(?:[Oo]ption|[Cc]hoice|[Aa]nswer)"
_CHOICE = re.compile(
    rf"(?:{_OPTION} )?(?:\(\s*([A-J])\s*\):?|([A-J])(?:\s*[).]|"
    r"\s*:(?=\s*(?:[-\d\\(]|(?:[Aa]n? )?[A-Za-z][a-z]))|$))\s*(.*)"
)
_CHOICES = re.compile(r"[A-J](?:,[A-J])+|(?=[A-J]{2,6}$)A?B?C?D?E?F?G?H?I?J?")
_CLOCK = re.compile(r"(\d{1,2})(?: ?: ?([0-5]\d))?(?: ?: ?([0-5]\d))?(?: ?([ap])\.? ?m\.?)?")
_MONTHS = {name.casefold(): n for names in (calendar.month_name, calendar.month_abbr) for n, name in enumerate(names)}


def worded(text: str) -> str | None:
    r"""Return the words of an answer that is only words, such as `\text{odd}` or `east`, in lower case; else None.

    Of "Yes, because ..." it is the yes. A formula such as `xy` is no word, nor is `p - q`.
    """
    plain = re.sub(r"^(?:an?|the) ", "", unworded(text).strip(" .!\"'").casefold())
    if verdict := re.match(r"(yes|no|true|false)[,.;:!] (?!.*\b(?:yes|no|true|false)\b)", plain):
        return verdict[1]
    if not _WORDS.fullmatch(plain):
        return None
    words = re.split(r"[ ,.'-]+", plain)
    if "\\text{" in AND.sub("", text) or any(len(word) > 3 or word in _SHORT_WORDS for word in words):
        names = sorted(" ".join(words).split(" and "))
        return _SAME_WORDS.get(" ".join(words), " and ".join(names))
    return None


def choice(text: str) -> tuple[str, str] | None:
    r"""Return the letter of `A`, `\text{(A)}`, `A) 12` or `(A)\ 12`, and what stands after it; None for no letter."""
    found = _CHOICE.fullmatch(unworded(text))
    return (found[1] or found[2], found[3]) if found and not _CHOICE.fullmatch(found[3]) else None


def choices(text: str) -> list[str] | None:
    r"""Return the letters of `A, C`, `\text{A and C}`, `(A),(C)` or `AC` in order; None for anything else."""
    letters = re.sub(r"[,;]+", ",", re.sub(rf"^{_OPTION}s? |[(){{}}\\ .]", "", AND.sub(",", unworded(text))))
    return sorted(letters.replace(",", "")) if _CHOICES.fullmatch(letters) else None


def moment(text: str) -> tuple[object, ...] | None:
    """Return hour, minute and second of `3:30 p.m.`, or the month and numbers of `20 June`; None for anything else."""
    plain = unworded(text).casefold()
    if (clock := _CLOCK.fullmatch(plain)) and (clock[2] or clock[4]):
        hour, half = int(clock[1]), clock[4]
        return ("time", hour % 12 + 12 * (half == "p") if half else hour, int(clock[2] or 0), int(clock[3] or 0))
    parts = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b", "", plain))
    months = [_MONTHS[part] for part in parts if part in _MONTHS]
    numbers = sorted(int(part) for part in parts if part.isdecimal() and len(part) < 5)
    return ("date", *months, *numbers) if len(months) == 1 and len(parts) == 1 + len(numbers) > 1 else None


# What may stand before `=` or `\in`: x, a_3, f(x), AB, \angle A, |AB|, S_1:S_2, \frac{AB}{CD}, (x, y).
_NAME = re.compile(
    r"\([A-Za-z]( ?, ?[A-Za-z]){1,3}\)|\|[A-Za-z0-9\\{}_ ']{1,20}\||[A-Za-z]\^\{-1\}\([A-Za-z]\)"
    r"|[A-Za-z\\](?:[A-Za-z0-9\\{}_ ,':/]|\^(?!\{?\d)){0,40}(?:\([A-Za-z0-9\\ ,_{}]{1,20}\))?"
)
_FUNCTION = re.compile(r"([A-Za-z](?:\^\{-1\})?)\(([A-Za-z])\)")
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_IN = re.compile(r"(.*[A-Za-z)}])\s*\\in(?![A-Za-z])\s*(.+)")
_NUMERIC = re.compile(
    r"\\(?:frac|sqrt|cdot|times|div|pi|binom|log|ln|sin|cos|tan|circ)(?![A-Za-z])|[^A-Za-z\\]|\\[^A-Za-z]"
)
# `, where k \in \mathbb{Z}`, `for any integer k` or `(k is an integer)` at the end
_DOMAIN = re.compile(
    r"[ ,;(]*(?:(?:where|with|for(?: any| all| some| every| an)?|\\forall) )?(?:([A-Za-z]) ?\\in ?"
    r"(\\mathbb\{[A-Z]\}[\^_+*>0{}]{0,6})|([A-Za-z]) ?(?:(?:is|are|be) )?(?:any |an )?(?:integers?|\u4e3a\u6574\u6570)"
    r"|(integers?|real numbers?|constants?) ([A-Za-z]))[ .]*\)?$"
)


def named(text: str) -> tuple[str, str]:
    r"""Return the name and the value of `name = value` or `name \in value`, or "" and the text."""
    if r"\begin" not in text and len(listed(text, thousands=True)) > 1:  # the items of a list have names of their own
        return "", text
    if (found := _IN.fullmatch(text)) and _NAME.fullmatch(found[1]):
        return key(found[1]), found[2]
    sides = split_top(text, "=")
    if len(sides) == 2 and numeric(sides[0]):  # 5 = x
        sides.reverse()
    if len(sides) > 1 and _NAME.fullmatch(sides[0]) and not numeric(sides[0]):
        if re.match(r"\\(?:sqrt|frac|log|ln)(?![A-Za-z])", sides[0]) and not several_letters(sides[0]):
            return "", text
        value = " = ".join(sides[1:])
        return key(sides[0]), value[1:-1] if value[0] == "{" and closes(value) == len(value) - 1 else value
    return "", text


def numeric(text: str) -> bool:
    """Return whether a text holds no letter that could be an unknown."""
    return not _NUMERIC.sub("", text)


def several_letters(text: str) -> bool:
    """Return whether a text holds two letters or more that could be unknowns."""
    return len(set(re.findall(r"[A-Za-z](?:_\{?\w+\}?)?", re.sub(r"\\[A-Za-z]+", "", text)))) > 1


def assigned(text: str) -> dict[str, str]:
    """Return the values by name of `k = 45, n = 2`, `(k,n) = (45,2)` or lines of a system; {} for anything else."""
    sides = split_top(text, "=")
    tuples = [side[1:-1] for side in sides if side.startswith("(") and closes(side) == len(side) - 1]
    if len(tuples) == len(sides) == 2:
        names, values = (split_top(side.replace(";", ","), ",") for side in tuples)
        pairs = list(zip(map(key, names), values, strict=True)) if len(names) == len(values) else []
    elif system := _CASES.fullmatch(text):
        pairs = [named(line.replace("&", "").strip(" ,;")) for line in system[1].split(r"\\") if line.strip()]
    else:
        pairs = [named(item) for item in listed(text, thousands=True)]
    return dict(pairs) if len(pairs) == len({name for name, _ in pairs if name}) > 1 else {}


def same_function(gold: str, answer: str, value: str) -> str | None:
    """Return the value with the gold's variable, if both names are of one function (or one is `y`); else None."""
    wanted, given = _FUNCTION.fullmatch(gold), _FUNCTION.fullmatch(answer)
    if (wanted and answer == "y") or (given and gold == "y"):
        return value
    return renamed(value, given[2], wanted[2]) if wanted and given and wanted[1] == given[1] else None


def renamed(text: str, old: str, new: str) -> str | None:
    """Return the text with another letter for a variable; None if that letter stands in it already."""
    letters = re.findall(r"\\[A-Za-z]+|[A-Za-z]", text)
    if old != new and new in letters:
        return None
    return re.sub(r"\\[A-Za-z]+|[A-Za-z]", lambda found: new if found[0] == old else found[0], text)


def without_domains(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Return both without `, k \in \mathbb{Z}` at the end, with the same letter for k; None if the domains differ.

    Of one alone it may say no more than is understood: an integer called k, n or the like, or a real number.
    """
    (gold, letter, domain), (answer, other, other_domain) = _domain(gold), _domain(answer)
    if domain and not other_domain and len(free := _letters(answer)) == 1:
        other, other_domain = free.pop(), domain
    elif other_domain and not domain and len(free := _letters(gold)) == 1:
        letter, domain = free.pop(), other_domain
    if domain and other_domain:
        changed = renamed(answer, other, letter) if domain == other_domain else None
        return None if changed is None else (gold, changed)
    understood = (letter or other) in "jklmnpqrst" or (domain or other_domain) == r"\mathbb{R}"
    return (gold, answer) if understood else None


def _letters(text: str) -> set[str]:
    """Return the unknowns of an answer without its name, such as the k of `x = 2k`."""
    value = named(text)[1]
    return {found for found in re.findall(r"\\[A-Za-z]+|[A-Za-z]", value) if found[0] != "\\"} - {"e", "i"}


def _domain(text: str) -> tuple[str, str, str]:
    found = _DOMAIN.search(unworded(text))
    if not found or not found.start():
        return text, "", ""
    real = found[4] and "integer" not in found[4]
    domain = found[2] or (r"\mathbb{R}" if real else r"\mathbb{Z}")
    return found.string[: found.start()], found[1] or found[3] or found[5], key(domain)
