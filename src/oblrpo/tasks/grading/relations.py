r"""Equations, inequalities and sets of real numbers, in whatever way they are written. Runs in the worker.

`-2 \le x < 1`, `[-2,1)`, `\{x : -2 \le x < 1\}` and `\{x : |2x+1| \le 3\} \setminus \{1\}` are one set of sympy's.
Two formulas are read by math-verify's parser, which may hang or use up memory.
"""

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, pairwise, product
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from oblrpo.tasks.grading.normal import closes, in_any_order, key, listed, relational, rewriting, split_top, top
from oblrpo.tasks.grading.units import number, tolerance

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


# Pinned, so that another version's defaults change nothing. Units, boxes and lists are compared before.
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
CONVERSION = ConversionConfig(
    interpret_as_mixed_fractions=True,
    interpret_simple_eq_as_assignment=False,
    interpret_contains_as_eq=True,
    lowercase_symbols=False,
)
# Names that the parser takes for something else: \gamma for Euler's constant, E_1 for the number e.
_renamed = rewriting(
    (r"\\gamma(?![A-Za-z])", r"\\Upsilon "),
    (r"(?<![A-Za-z\\])([Ee])\s*_", r"\\Xi_\1_"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    (r"\\log\s*_\s*(?:e|\{\s*e\s*\})", r"\\ln "),
    (r"\\sqrt\s*\[(\d*[13579])\]\s*\{\s*-\s*(\d+)\s*\}", r"(-\\sqrt[\1]{\2})"),
    (r"\\text\{\s*cis\s*\}\s*(\([^()]*\)|\\frac\{[^{}]*\}\{[^{}]*\}|[^\s+*]+)", r"e^{i(\1)}"),
    (r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1}{180}\\pi)"),
)
# What the parser leaves out without a word, so that f'(x) would be f(x), gcd(a, b) 1 and 1+\ldots+n 1+n; words; and
# what is no number: a transpose, a cross product, an angle ABC, which is not ACB, and a limit of a sequence a_n.
LEFT_OUT = re.compile(
    r"'|!\s*!|\^\s*\{?\s*T(?![A-Za-z])|\\lim[^{}]*\{[^{}]*\}.*[A-Za-z]_|\\vec\s*\{?\w\}?\s*\\times"
    r"|\\(?:prime|nabla|angle|triangle|[lc]?dots|sech|csch|coth)|\\(?:gcd|lcm)(?![^A-Za-z]*\))"
    r"|(?<!_)(?<!_\{)\\text\{[^{}]*[A-Za-z]{2}[^{}]*\}"
)
# Of a complex number the absolute value is another one; all letters are read as real numbers.
COMPLEX = re.compile(r"\| ?[zw]")
# Formulas are evaluated at points from these ranges, and are equal if they are at a few and differ nowhere.
RANGES, ENOUGH = [(1, 2), (2, 9), (0, 1), (0, 1), (9, 40), (-1, 1), (-2, 2), (-9, 9), (-40, 40)], 2
# Beside these a letter such as n is a whole number, and more points are tried.
COUNTS = (sympy.factorial, sympy.binomial, sympy.Sum, sympy.Product)
STEPS = (sympy.floor, sympy.ceiling, sympy.Mod, *COUNTS)
UNDONE = (sympy.floor, sympy.ceiling, sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
# Digits to which a difference is evaluated, besides those of the numbers in it, and the most.
DIGITS, MAX_DIGITS = 60, 20_000
# The roots of a polynomial of up to this degree take a fiftieth of a second; so far from 0 its size shows the degree.
MAX_DEGREE, FAR = 12, sympy.Float(10) ** 40


class Unreadable(Exception):  # noqa: N818  (a verdict on the text)
    """The formula cannot be read."""


def same_formula(gold: str, answer: str) -> bool:
    """Return whether two tidy formulas are equal, a gold decimal to 6 places; Unreadable if one is not a formula."""
    if r"\ln" in gold and r"\log" in answer:  # beside a gold with ln, log means the same; alone it has base 10
        answer = re.sub(r"\\log(?![A-Za-z]|\s*_)", r"\\ln", answer)
    if bool(COMPLEX.search(gold)) != bool(COMPLEX.search(answer)):
        return False
    given, decimal = read(answer), number(gold)
    if decimal is not None and decimal.decimal:
        value = sympy.N(given, 30)
        known = (value.is_Float or value.is_Rational) and value.is_finite
        wanted = sympy.Rational(decimal.value)
        return bool(known and abs(sympy.Rational(value) - wanted) <= sympy.Rational(tolerance(decimal.value)))
    return _same(read(gold), given)


def read(text: str) -> Any:
    """Return the formula, decimals as rationals, with the constants i and e; Unreadable if it is not one."""
    exact = number(text)
    if exact is not None and not exact.percent:
        return sympy.Rational(exact.value.numerator, exact.value.denominator)
    if len(split_top(text, ",")) > 1:
        raise Unreadable("a list")
    text = _renamed(text)
    if LEFT_OUT.search(text):
        raise Unreadable("primes, dots or words")
    try:
        formula = latex2sympy(
            normalize_latex(text, NORMALIZATION),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=CONVERSION,
        )
        formula = formula.xreplace({x: sympy.Rational(str(x)) for x in formula.atoms(sympy.Float)})
        constants = {"i": sympy.I, "e": sympy.E}
        formula = formula.xreplace({x: constants[x.name] for x in formula.free_symbols if x.name in constants})
        # `dv/dt` of a v that does not say how it depends on t is an unknown; sympy takes it for 0.
        unknown = [x for x in formula.atoms(sympy.Derivative) if x.doit() == 0]
        formula = formula.xreplace({x: sympy.Symbol(str(x), real=True) for x in unknown})
        # F_k under a sum over k is a function of k.
        sums = formula.atoms(sympy.Sum, sympy.Product)
        index = {x: k for each in sums for k in each.variables for x in each.free_symbols if k.name in x.name[2:]}
        formula = formula.xreplace({x: sympy.Function(x.name)(k) for x, k in index.items()})
    except Exception as error:  # a parser of foreign text raises whatever it likes
        raise Unreadable(str(error)[:200]) from None
    if formula.has(sympy.nan, sympy.zoo):  # all that hold an infinity would be equal
        raise Unreadable("division by zero")
    return formula


def _same(gold: Any, answer: Any) -> bool:
    if gold == answer or not all(isinstance(x, sympy.Expr) and x.is_finite is not False for x in (gold, answer)):
        return bool(gold == answer)
    if gold.is_Pow and answer.is_Pow and gold.base == answer.base and gold.base.is_Integer and gold.base > 1:
        return _same(gold.exp, answer.exp)  # towers
    if not any(x.has(*UNDONE) for x in (gold, answer)):
        unknown = {x: sympy.Dummy(real=True) for x in gold.atoms(AppliedUndef) | answer.atoms(AppliedUndef)}
        gold, answer = gold.xreplace(unknown), answer.xreplace(unknown)
    agree = _agree(gold, answer)
    return bool(sympy.simplify((gold - answer).doit()) == 0) if agree is None else agree


def _agree(gold: Any, answer: Any) -> bool | None:
    """Return whether they agree at random points of their domain, else outside it; None if too few are known."""
    agreed, enough = 0, ENOUGH if gold.free_symbols | answer.free_symbols else 1
    for same in _verdicts(gold, answer, inside=True):
        if not same:
            return False
        agreed += 1
    outside = [] if agreed >= enough else list(_verdicts(gold, answer, inside=False))
    return all(outside) if agreed + len(outside) >= enough else None


def _verdicts(gold: Any, answer: Any, inside: bool) -> Iterator[bool]:
    """Yield whether they are equal at each point where all roots and logarithms are real (any, beside i), or not."""
    kinds = (sympy.Pow, sympy.log, sympy.asin, sympy.acos)
    sides = [sorted(formula.atoms(*kinds), key=sympy.count_ops) for formula in (gold, answer)]
    real = not (gold.has(sympy.I) or answer.has(sympy.I))
    fits = all if gold.has(sympy.Abs) == answer.has(sympy.Abs) else any  # ln|x| is more than ln x
    for point in _points(sympy.Tuple(gold, answer)):
        with suppress(Exception):  # unknown functions, poles, overflow
            domain = not real or fits(all(sympy.N(part.subs(point)).is_real for part in parts) for parts in sides)
            if domain == inside:
                one, other = (x.doit() if x.has(*UNDONE) else x for x in (gold.subs(point), answer.subs(point)))
                if (same := _zero(one - other)) is not None:
                    yield same


def _points(both: sympy.Tuple) -> Iterator[dict[Any, Any]]:
    """Yield random values of the symbols; what counts (n!, below in a binomial, sums; i to n beside these) is whole."""
    symbols = sorted(both.free_symbols, key=str)
    integers = any(x.base.is_negative for x in both.atoms(sympy.Pow)) or both.has(*STEPS)
    whole = {x for part in both.atoms(*COUNTS) for x in part.args[-1].free_symbols}
    rng = random.Random(0)
    size = min(10**9, max([1, *(abs(x.p) for x in both.atoms(sympy.Rational))]))
    ranges = [*RANGES, (-2 * size, 2 * size), (size, 9 * size), (-9 * size, -size)] * (4 if integers else 1)
    for round_, (low, high) in enumerate(ranges if symbols else ranges[:1]):
        yield {
            x: sympy.Integer(rng.randint(1, min(abs(high), 40)))
            if integers and (x in whole or x.name[0] in "ijklmnKMN" or round_ % 2)
            else sympy.Rational(rng.randint(1000 * low + 1, 1000 * high - 1), 1000)
            for x in symbols
        }
    if not integers:
        yield from _pieces(both, symbols, rng)


def _pieces(both: sympy.Tuple, symbols: list[Any], rng: random.Random) -> Iterator[dict[Any, Any]]:
    r"""Yield a point in each piece of |g|, max(g, h) and \sqrt{g}: on each symbol's axis, between the roots of g."""
    bends = {x.base: 2 for x in both.atoms(sympy.Pow) if x.exp.is_Rational and x.exp.q % 2 == 0}  # \sqrt{x} has one
    bends |= {a - b: 1 for x in both.atoms(sympy.Abs, sympy.Max, sympy.Min) for a, b in combinations((*x.args, 0), 2)}
    for x, sign in product(symbols, (1, -1)[: len(symbols)]):
        point = {y: sympy.Rational(sign * rng.randint(1, 9000), 1000) for y in symbols if y != x}
        cuts = set()
        for curve, least in ((bend.subs(point), least) for bend, least in bends.items()):
            with suppress(Exception):  # what does not converge
                low = curve.is_polynomial(x) and abs(sympy.N(curve.subs(x, FAR))) < FAR ** (MAX_DEGREE + 1)
                roots = sympy.Poly(curve, x).sqf_part().nroots(n=9) if low and sympy.degree(curve, x) >= least else ()
                cuts |= {sympy.Rational(str(sympy.re(root))) for root in roots}
        for left, right in pairwise([min(cuts) - 9, *sorted(cuts), max(cuts) + 9] if cuts else []):
            yield point | {x: left + (right - left) * sympy.Rational(rng.randint(1, 999), 1000)}


def _zero(difference: Any) -> bool | None:
    """Return whether a number is zero: evaluated to more digits than its parts have; None if that is not known."""
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.free_symbols or difference.has(sympy.nan, sympy.zoo, sympy.oo, AppliedUndef):
        return None
    parts = difference.atoms(sympy.Pow, sympy.exp, sympy.Rational)
    parts |= {sympy.exp(x.args[0]) for x in difference.atoms(sympy.sinh, sympy.cosh, sympy.tanh, sympy.coth, sympy.erf)}
    sizes = [abs(sympy.N(x, 3)) for x in parts]
    digits = int(min(DIGITS + 2 * sum(abs(sympy.log(x, 10)) for x in sizes if x != 0), MAX_DIGITS))
    try:
        value, least = difference.evalf(5, maxn=digits, strict=True), 0
    except PrecisionExhausted:  # in one part at least, which may be a zero beside others: of `0 + 9` the 9 counts
        value, least = difference.evalf(5, maxn=digits), sympy.Float(10) ** (-digits // 2)  # above the root of a zero
    if not (value.is_number and value.is_finite):
        return None
    return False if abs(value) > least else digits < MAX_DIGITS or None
