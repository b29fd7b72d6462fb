"""The parser against trees whose value is known, and what it refuses."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lab.tasks.countdown import MAX_DEPTH, MAX_LENGTH, evaluate


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("3*5+7", 22, [3, 5, 7]),
        ("3+5*7", 38, [3, 5, 7]),
        ("(3+5)*7", 56, [3, 5, 7]),
        ("9-4-3", 2, [9, 4, 3]),
        ("9-(4-3)", 8, [9, 4, 3]),
        ("3-9", -6, [3, 9]),
        ("7/2/2", Fraction(7, 4), [7, 2, 2]),
        ("7/2*2", 7, [7, 2, 2]),
        (" 3 * ( 5 + 10 ) ", 45, [3, 5, 10]),
        ("((0))", 0, [0]),
    ],
)
def test_values(text, value, numbers):
    assert evaluate(text) == (value, numbers)


BAD = [
    "", " ", "+", "3+", "*3", "-3", "+3", "3++4", "3--4", "3**2", "3//2", "(", ")", "()", "(3", "3)", "(3)(4)",
    "3(4)", "3 4",
    "03", "3.0", "3e2", "1_0", "0x1", "3+a", "3,4", "3=3", "3%2", "3^2", "\u0663", "3\u00d74", "3\n+4", "3\x00",
    "1/0", "1/(2-2)",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_an_expression_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|unexpected|arithmetic|zero"):
        evaluate(text)


def test_depth_and_length_are_bounded():
    assert evaluate("(" * MAX_DEPTH + "3" + ")" * MAX_DEPTH) == (3, [3])
    with pytest.raises(ValueError, match="deep"):
        evaluate("(" * (MAX_DEPTH + 1) + "3" + ")" * (MAX_DEPTH + 1))
    assert evaluate("1" + " " * (MAX_LENGTH - 1)) == (1, [1])
    with pytest.raises(ValueError, match="too long"):
        evaluate("1" + " " * MAX_LENGTH)


LEAVES = st.integers(0, 99).map(lambda number: (str(number), Fraction(number), [number]))


def join(parts):
    (left, value, numbers), operator, (right, other, others) = parts
    if operator == "/":
        result = value / other if other else None
    else:
        result = {"+": value + other, "-": value - other, "*": value * other}[operator]
    return f"({left}){operator}({right})", result, numbers + others


TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner)
        .filter(lambda parts: parts[0][1] is not None and parts[2][1] is not None)
        .map(join)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(TREES)
def test_parenthesised_trees_have_their_value(tree):
    text, value, numbers = tree
    assume(len(text) <= MAX_LENGTH)
    if value is None:
        with pytest.raises(ValueError, match="zero"):
            evaluate(text)
    else:
        assert evaluate(text) == (value, numbers)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("+-"), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=5
    )
)
def test_precedence_without_parentheses(products):
    value, text = 0, ""
    for place, (sign, factors) in enumerate(products):
        product = 1
        for factor in factors:
            product *= factor
        value += -product if place and sign == "-" else product
        text += (sign if place else "") + "*".join(map(str, factors))
    assert evaluate(text)[0] == value


@settings(deadline=None)
@given(st.text() | st.text("0123456789+-*/() ", max_size=60))
def test_any_text_gives_a_value_or_a_value_error(text):
    try:
        value, numbers = evaluate(text)
    except ValueError:
        return
    assert isinstance(value, Fraction)
    assert numbers
