"""The clock counts every second once."""

import time

import pytest

from oblrpo.clock import Clock


def test_the_seconds_of_a_part_within_another_are_not_the_others(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.lap() == {"time/outer": 7.0, "time/inner": 3.0}
    assert clock.lap() == {}


def test_a_function_is_counted_even_where_it_fails(monkeypatch):
    now = iter([0.0, 2.0, 2.0, 5.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    divided = clock.part("division")(lambda number, by: number / by)
    assert divided(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)
    assert clock.lap() == {"time/division": 5.0}
