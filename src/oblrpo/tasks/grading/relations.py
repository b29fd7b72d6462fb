r"""Equations, inequalities and sets of real numbers, in whatever way they are written. Runs in the worker.

`-2 \le x < 1`, `[-2,1)`, `\{x : -2 \le x < 1\}` and `\{x : |2x+1| \le 3\} \setminus \{1\}` are one set of sympy's.
"""

import re
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from oblrpo.tasks.grading.algebra import Unreadable, read, same_formula
from oblrpo.tasks.grading.normal import closes, in_any_order, key, listed, relational, split_top, top

_REALS, _INFINITY, _POINT = sympy.S.Reals, sympy.oo, sympy.Symbol("point", real=True)
_RELATIONS = {
    "<": sympy.StrictLessThan,
    ">": sympy.StrictGreaterThan,
    r"\le": sympy.LessThan,
    r"\ge": sympy.GreaterThan,
    r"\ne": sympy.Unequality,
    "=": sympy.Equality,
}
_SETS = {
    "R": _REALS,
    r"\mathbb{R}": _REALS,
    **dict.fromkeys((rf"\mathbb{{R}}{sign}" for sign in ("^+", "_+", "_{>0}")), sympy.Interval.open(0, _INFINITY)),
    r"\mathbb{Z}": sympy.S.Integers,
    r"\mathbb{Q}": sympy.S.Rationals,
    r"\emptyset": sympy.S.EmptySet,
}
_SIGN = re.compile(r"<|>|=|\\(?:le|ge|ne|in|notin)(?![A-Za-z])")
_NAME = r"[A-Za-z](?:_\{?\w+\}?)?"
_BUILDER = re.compile(
    rf"(?:\\\{{)?\s*({_NAME})(?:\s*\\in(?![A-Za-z])\s*([^|:]*?))?\s*(?:\||:|\\mid(?![A-Za-z]))(.*?)(?:\\\}})?"
)
_OR = re.compile(r"\\text\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
_AND = re.compile(r"\\text\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])")


class _Several(Exception):  # noqa: N818
    """The condition is none on one real variable."""


def same(gold: str, answer: str) -> bool:
    """Return whether two tidy formulas, relations or sets of reals are equal; Unreadable if one cannot be read."""
    if relational(gold) or relational(answer):
        names: tuple[set[str], set[str]] = (set(), set())
        try:
            wanted, given = _set(gold, names[0]), _set(answer, names[1])
            if max(map(len, names)) > 1:
                raise _Several
        except _Several:
            return in_any_order(_relations(gold), _relations(answer), _same_relation)
        equal = wanted == given or bool(wanted.is_subset(given) and given.is_subset(wanted))
        return len(names[0] | names[1]) < 2 and equal
    if "=" in top(gold) and "=" in top(answer):
        return in_any_order(_relations(gold), _relations(answer), _same_relation)
    if "matrix}" in gold + answer:
        one, other = read(gold).doit(), read(answer).doit()
        return bool(one.shape == other.shape and (one - other).applyfunc(sympy.simplify).is_zero_matrix)
    return same_formula(gold, answer)


def _set(text: str, names: set[str]) -> sympy.Set:
    """Return the real numbers that a condition or a set allows, and add the name of its variable, if any, to names."""
    text = text.strip()
    braced = text.startswith(r"\{") and closes(text[1:]) == len(text) - 2
    if (braced or text[0] != "\\") and (built := _BUILDER.fullmatch(text)):
        bound = {key(built[1])}
        condition = _set(built[3], bound)
        if len(bound) > 1:
            raise _Several
        return sympy.Intersection(condition, _set(built[2], set()) if built[2] else _REALS)
    pieces = [text] if braced else _OR.split(text)
    if len(pieces) == 1 and all(_signs(piece) for piece in split_top(text, r"\cup")):
        pieces = split_top(text, r"\cup")
    if len(pieces) > 1:
        return sympy.Union(*(_set(piece, names) for piece in pieces))
    if len(pieces := [text] if braced else _AND.split(text)) > 1:
        sets = [_set(piece, names) for piece in pieces]
        return sympy.Intersection(*sets) if any(map(_signs, pieces)) else sympy.Union(*sets)
    if not braced and len(pieces := listed(text, thousands=True)) > 1:
        return _of_list(pieces, names)
    if signs := _signs(text):
        sides = _sides(text, signs)
        chain = zip(sides, [sign[0] for sign in signs], sides[1:], strict=False)
        return sympy.Intersection(*[_of_relation(*relation, names) for relation in chain])
    for separator, join in ((r"\cup", sympy.Union), (r"\cap", sympy.Intersection), (r"\setminus", sympy.Complement)):
        if len(pieces := split_top(text, separator)) > 1:
            return join(*(_set(piece, names) for piece in pieces))
    if (literal := _SETS.get(key(text))) is not None:
        return literal
    if text.startswith(r"\{"):
        return sympy.FiniteSet(*map(_value, listed(text[2:-2], thousands=False)))
    ends = split_top(text[1:-1].replace(";", ","), ",")
    if len(ends) == 2 and text[0] in "([" and closes(text) == len(text) - 1:
        low, high = map(_value, ends)
        if (low.is_infinite and text[0] == "[") or (high.is_infinite and text[-1] == "]"):
            raise Unreadable("an infinity in square brackets")
        if low > high or (low == high and text[0] + text[-1] != "[]"):
            raise Unreadable("no interval")
        return sympy.Interval(low, high, text[0] == "(", text[-1] == ")")
    return sympy.FiniteSet(_value(text))


def _of_list(pieces: list[str], names: set[str]) -> sympy.Set:
    r"""Return what commas mean: all of them if one says `\ne` or `\in`, else what is neither nothing nor everything."""
    for place in range(1, len(pieces)):  # x \ne 1, 2
        if not _signs(pieces[place]) and (before := re.fullmatch(r"(.*\\ne(?![A-Za-z])).*", pieces[place - 1])):
            pieces[place] = f"{before[1]} {pieces[place]}"
    sets = [_set(piece, names) for piece in pieces]
    both, any_of_them = sympy.Intersection(*sets), sympy.Union(*sets)
    if any(re.search(r"\\(?:ne|in|notin)(?![A-Za-z])", piece) for piece in pieces) or any_of_them == _REALS:
        return both
    if both == sympy.S.EmptySet or not any(map(_signs, pieces)):
        return any_of_them
    raise Unreadable("a list of conditions that may be all or any")


def _of_relation(left: str, sign: str, right: str, names: set[str]) -> sympy.Set:
    if sign in {r"\in", r"\notin"}:
        points = _set(right, names) if sign == r"\in" else _REALS - _set(right, names)
        variable = read(left)
        names.update(map(str, variable.free_symbols))
        return points if variable.is_Symbol else points.as_relational(_POINT).subs(_POINT, variable).as_set()
    one, other = (sympy.sqrtdenest(read(side).doit()) for side in (left, right))
    variables = one.free_symbols | other.free_symbols
    if len(variables) != 1 or (one - other).atoms(AppliedUndef):
        raise _Several
    relation = _RELATIONS[sign](one, other)
    names.update(map(str, variables))
    return relation.as_set() if relation not in (sympy.true, sympy.false) else _REALS if relation else sympy.S.EmptySet


def _value(text: str) -> Any:
    value = read(text).doit()
    if value.free_symbols:
        raise _Several
    return sympy.sqrtdenest(sympy.simplify(value))


def _signs(text: str) -> list["re.Match[str]"]:
    return list(_SIGN.finditer(top(text)))


def _sides(text: str, signs: list["re.Match[str]"]) -> list[str]:
    ends = [0, *(place for sign in signs for place in sign.span()), len(text)]
    return [text[start:end].strip() for start, end in zip(ends[::2], ends[1::2], strict=True)]


def _relations(text: str) -> list[tuple[str, Any, Any]]:
    """Return the sign (`<` turned), the difference of the sides and the left side of each relation in the text."""
    relations = []
    for piece in listed(text, thousands=True):
        signs = _signs(piece)
        if _OR.search(text) or not signs:
            raise Unreadable("no list of relations")
        # A derivative is another function: the parser leaves its prime out.
        sides = [read(re.sub(r"([A-Za-z])'", r"\1_{p}", side)).doit() for side in _sides(piece, signs)]
        for left, sign, right in zip(sides, signs, sides[1:], strict=False):
            turned = sign[0] in {"<", r"\le"}
            one, other = (right, left) if turned else (left, right)
            relations.append(({"<": ">", r"\le": r"\ge"}.get(sign[0], sign[0]), sympy.expand(one - other), one))
    return relations


def _same_relation(gold: tuple[str, Any, Any], answer: tuple[str, Any, Any]) -> bool:
    """Return whether one difference is a multiple of the other, a positive one for an inequality."""
    (sign, wanted, side), (other_sign, given, other_side) = gold, answer
    if sign != other_sign:
        return False
    if sign in {"=", r"\ne"}:
        wanted, given = (sympy.expand(sympy.fraction(sympy.together(difference))[0]) for difference in (wanted, given))
    if (wanted == 0) or (given == 0):  # an identity
        return bool(wanted == given and sympy.simplify(side - other_side) == 0)
    ratio = sympy.simplify(wanted / given)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0 and (sign in {"=", r"\ne"} or ratio > 0))
