"""Equality of two formulas by math-verify. Runs in the worker, because reading a formula may hang or use up memory."""

import random
import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from math_verify.grader import sympy_expr_eq
from sympy.core.relational import Equality, Relational

from oblrpo.tasks.grading.normal import split_top
from oblrpo.tasks.grading.number import number, tolerance

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
# As in math-verify: decimal places (decimals are made rational before), and digits of numeric evaluation.
ROUNDING, PRECISION = 6, 15
# Names that the parser takes for something else: \gamma for Euler's constant, E_1 for the number e.
RENAMED = [
    (re.compile(r"\\gamma(?![A-Za-z])"), r"\\Upsilon "),
    (re.compile(r"(?<![A-Za-z\\])E\s*_"), r"\\Xi_"),
]
# Points at which two formulas are evaluated, and the relative difference from which on they are different.
POINTS, DIFFERENT = 3, 1e-9


class Unreadable(Exception):  # noqa: N818  (a verdict on the text)
    """The formula cannot be read."""


def same_formula(gold: str, answer: str) -> bool:
    """Return whether two tidy formulas are equal, a gold decimal to 6 places; Unreadable if one is not a formula."""
    if r"\ln" in gold and r"\log" in answer:  # beside a gold with ln, log means the same; alone it has base 10
        answer = re.sub(r"\\log(?![A-Za-z]|\s*_)", r"\\ln", answer)
    given, decimal = read(answer), number(gold)
    if decimal is not None and decimal.decimal:
        return _rounds_to(given, decimal.value)
    wanted = read(gold)
    if isinstance(wanted, Relational) or isinstance(given, Relational):
        return isinstance(wanted, Relational) and isinstance(given, Relational) and _same_relation(wanted, given)
    difference = _differ(wanted, given)
    if difference is True:
        return False
    if bool(sympy_expr_eq(wanted, given, ROUNDING, PRECISION)):
        # math-verify calls differences below its precision zero; a point at which they agree relatively rules that out.
        return difference is False or bool(sympy.simplify(wanted - given) == 0)
    return False


def read(text: str) -> Any:
    """Return the formula, decimals as rationals, with the constants i and e; Unreadable if it is not one."""
    exact = number(text)
    if exact is not None and not exact.percent:
        return sympy.Rational(exact.value.numerator, exact.value.denominator)
    if len(split_top(text, ",")) > 1:
        raise Unreadable("a list")
    for pattern, replacement in RENAMED:
        text = pattern.sub(replacement, text)
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
    except RecursionError:
        raise Unreadable("too deep") from None
    except Exception as error:  # a parser of foreign text raises whatever it likes
        raise Unreadable(str(error)[:200]) from None
    if formula.has(sympy.nan, sympy.zoo):  # all that hold an infinity would be equal
        raise Unreadable("division by zero")
    return formula


def _same_relation(gold: Any, answer: Any) -> bool:
    """Return whether two equations are multiples of each other; inequalities are compared by math-verify."""
    if isinstance(gold, Equality) and isinstance(answer, Equality):
        left, right = sympy.expand((gold.lhs - gold.rhs).doit()), sympy.expand((answer.lhs - answer.rhs).doit())
        ratio = sympy.simplify(left / right) if right != 0 else sympy.nan
        return bool(ratio.is_number and ratio.is_finite and ratio != 0)
    if isinstance(gold, Equality) or isinstance(answer, Equality):
        return False
    return bool(sympy_expr_eq(gold, answer, ROUNDING, PRECISION))


def _rounds_to(answer: Any, gold: Fraction) -> bool:
    value = sympy.N(answer, 30)
    if not (value.is_Float or value.is_Rational) or not value.is_finite:
        return False
    exact = sympy.Rational(value)
    return abs(Fraction(int(exact.p), int(exact.q)) - gold) <= tolerance(gold)


def _differ(gold: Any, answer: Any) -> bool | None:
    """Return whether the formulas differ at a few random points; None if they cannot be evaluated there."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    rng = random.Random(0)
    seen = False
    for _ in range(POINTS if symbols else 1):
        # Between 1 and 2, with few digits: inside the domain of most formulas.
        point = {symbol: sympy.Rational(rng.randint(1001, 1999), 1000) for symbol in symbols}
        try:
            one, other = complex(sympy.N(gold.subs(point), 30)), complex(sympy.N(answer.subs(point), 30))
        except Exception:  # derivatives, unknown functions, overflow
            continue
        size = max(abs(one), abs(other))
        if not size < float("inf"):
            continue
        if abs(one - other) > DIFFERENT * size:
            return True
        seen = True
    return False if seen else None
