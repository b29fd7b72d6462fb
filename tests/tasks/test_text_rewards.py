"""The rewards of texts and of last numbers."""

import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblrpo.rewards.built_in import built_in
from oblrpo.tasks.data import MAX_DIGITS, last_number


def exact(gold, completion):
    return built_in("exact")(completions=[completion], answer=[gold])[0]


def numeric(gold, completion):
    return built_in("numeric")(completions=[completion], answer=[gold])[0]


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("Paris", "Paris", 1.0),
        ("Paris", "  Paris\n", 1.0),
        ("New  York", "New\n\tYork ", 1.0),
        ("Paris", "paris", 0.0),
        ("Paris", "Paris.", 0.0),
        ("New York", "NewYork", 0.0),
        ("1", "1.0", 0.0),
        ("Paris", "", 0.0),
        ("a b", "b a", 0.0),
    ],
)
def test_exact(gold, completion, reward):
    assert exact(gold, completion) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", "1234"),
        ("The answer is 7.", "7"),
        ("so 7.50.", "7.5"),
        ("$18", "18"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        ("-1,234,567.89", "-1234567.89"),
        ("x = -3", "-3"),
        ("(-3)", "-3"),
        ("10-5", "5"),
        ("f(2)-5", "5"),
        ("100-$5", "5"),
        ("10 - 5", "5"),
        ("a-5", "5"),
        ("3,4", "4"),
        ("1,2345", "2345"),
        ("12345,678", "678"),
        ("1,234,5678", "5678"),
        (".5", "0.5"),
        ("5%", "5"),
        ("**42**", "42"),
        ("\\boxed{42}", "42"),
        ("first 3, then 4 apples", "4"),
        ("007", "7"),
        ("no number", None),
        ("", None),
        ("\u0663", None),
        ("\u00b2", None),
        ("-", None),
        ("$,.", None),
        ("9" * MAX_DIGITS, "9" * MAX_DIGITS),
        ("9" * (MAX_DIGITS + 1), None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("work 3\n#### 1,234", "It is $1234.00.", 1.0),
        ("#### 18", "18 or 19", 0.0),
        ("#### 18", "19, no, 18", 1.0),
        ("#### 18", "-18", 0.0),
        ("#### -18", "-18", 1.0),
        ("#### 0.1", "0.10", 1.0),
        ("#### 0.1", "0.1000000000000000055", 0.0),  # Decimal, not float
        ("#### 100000000000000000001", "100000000000000000000", 0.0),
        ("#### 18", "", 0.0),
        ("none", "none", 0.0),
        ("#### 18", "eighteen", 0.0),
    ],
)
def test_numeric(gold, completion, reward):
    assert numeric(gold, completion) == reward


def test_hostile_completions_earn_nothing_fast(hostile):
    start = time.perf_counter()
    assert (exact("-77", hostile), numeric("-77", hostile)) == (0.0, 0.0)
    assert time.perf_counter() - start < 1.0


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_text_gets_a_reward(gold, completion):
    assert exact(gold, completion) in (0.0, 1.0)
    assert numeric(gold, completion) in (0.0, 1.0)
    assert exact(gold, gold) == 1.0


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=2))
def test_a_number_is_found_however_it_is_written(number):
    for text in (f"{number}", f"so {number:,} apples.", f"#### {number}.", f"= {number}00"):
        assert last_number(text) == number
        assert numeric(f"#### {number + 1}", text) == 0.0
