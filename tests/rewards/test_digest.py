"""A callable's digest tells whether it is the one that a run was started with, or the run says that it cannot tell."""

import enum
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

import numpy
import pytest

from oblrpo.rewards.user import digest_and_gaps


class Scaled:
    __slots__ = ("__dict__", "kept")

    def __init__(self, scale):
        self.scale = self.kept = scale
        self.me = self

    def __call__(self, completions, **columns):
        return [self.scale] * len(completions)


class Broken:
    @property
    def __dict__(self):
        raise ValueError

    def __call__(self, completions):
        return []


class Colour(enum.IntFlag):
    RED, BLUE = 1, 2


@dataclass
class Rule:
    pattern: re.Pattern = re.compile("a")
    weights: dict = field(default_factory=dict)


def scaled(completions, scale=1, **columns):
    return [scale] * len(completions)


def with_default(value):
    def f(completions, scale=value):
        return [scale] * len(completions)

    return f


def enclosing(value):
    def f(completions):
        return [value] * len(completions)

    return f


def wrapped(value):
    return (
        functools.wraps(scaled)(lambda *args, **columns: value) if value is None else functools.cache(enclosing(value))
    )


MAKE = [
    Scaled, with_default, enclosing, wrapped, lambda value: Scaled(value).__call__,
    lambda value: functools.partial(scaled, scale=value), lambda value: functools.partial(scaled, [], value),
    lambda value: functools.partial(enclosing(value)), lambda value: enclosing(enclosing(value)),
]  # fmt: skip
VALUES = [
    (1, 2), (10**5000, 10**5000 + 1), ("a", "b"), (b"a", b"b"), ([1, [2]], [1, [3]]), ({"k": 1}, {"k": 2}), ({1}, {2}),
    (re.compile("a"), re.compile("a", re.IGNORECASE)), (Rule(), Rule(re.compile("b"))), (len, max), (scaled, Scaled),
    (numpy.float64(1), numpy.float64(2)), (None, False), (Colour.RED, Colour.BLUE), (Colour(0), Colour.RED),
]  # fmt: skip


@pytest.mark.parametrize("make", MAKE)
def test_the_values_that_a_callable_carries_are_part_of_it(make):
    for one, other in VALUES:
        if make is wrapped and one is None:
            continue
        (first, unknown), (again, _), (second, _) = (digest_and_gaps(make(value)) for value in (one, one, other))
        assert first == again
        assert first != second, (one, other)
        assert not unknown


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Scaled(numpy.zeros(3)), ("scale (ndarray)", "kept (ndarray)")),
        (functools.partial(scaled, scale=[Scaled(1)]), ("scale (Scaled)",)),
        (functools.partial(scaled, {"a": object()}), ("arguments.a (object)",)),
        (enclosing(Rule(weights={"k": {1: open}, "n": numpy})), ("value.weights.n (module)",)),
        (lambda completions: [], ("the source",)),
        (enclosing(lambda completions: []), ("the source of value",)),
        (Broken(), ("all of it",)),
    ],
)
def test_what_has_no_digest_is_named(function, words):
    assert set(digest_and_gaps(function)[1]) == set(words)


def test_what_of_it_can_be_told_is_told_all_the_same():
    thing = object()
    first, second = (digest_and_gaps(functools.partial(f, extra=thing))[0] for f in (scaled, enclosing(1)))
    assert first != second


SCRIPT = """
import enum, functools, json, random, re, sys, threading
from oblrpo.rewards.user import digest_and_gaps
Mark = enum.Enum("Mark", {"ONE": object()})
def timed(f):
    calls = []
    return functools.wraps(f)(lambda **given: (calls.append(1), f(**given))[1])
@timed
def score(completions, words=frozenset({"a", "b", "c"})): return [w in {"x", "y", "z"} for w in completions]
class Judge:
    def __init__(self):
        self.lock, self.random, self.mark, self.stream = threading.Lock(), random.Random(), Mark.ONE, sys.stdout
        self.ranks, self.words, self.pattern = dict.fromkeys({"d", "e", "f"}, 0), {"g", "h", "i"}, re.compile("a+")
        self.client = self.me = self
    def __call__(self, completions): return score(completions)
def made():
    words, judge = {"j", "k", "l"}, Judge()
    return lambda completions: [w in words and judge for w in completions]
judge = Judge()
bound = functools.partial(judge, words={"m", "n", "o"})
rewards = [score, judge, judge.__call__, bound, made(), Judge, functools.cache(score)]
print(json.dumps([digest_and_gaps(reward) for reward in rewards]))
"""  # fmt: skip


def test_the_same_script_has_the_same_digests_in_every_process(tmp_path):
    """Whatever order sets have, and wherever objects lie: a run that is refused for nothing costs more than a miss."""
    (tmp_path / "script.py").write_text(SCRIPT)
    said = {
        subprocess.run(
            [sys.executable, tmp_path / "script.py"],
            capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(said) == 1
    assert all(digest for digest, _ in json.loads(said.pop()))


def test_a_file_that_is_edited_while_a_run_goes_on_is_not_what_the_run_uses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_meanwhile.py"
    file.write_text("def score(completions):\n    return [1.0 for _ in completions]\n")
    function = importlib.import_module("edited_meanwhile").score
    before = digest_and_gaps(function)
    file.write_text("def score(completions):\n    return [22.0 for _ in completions]\n")
    assert digest_and_gaps(function) == before
