"""Means of windows and their noise."""

import math

import numpy as np
import pytest

from oblrpo.diagnosis.course import POOLED, WINDOW, Course, Mean, finite


def course_of(values, key="x", **others):
    course = Course()
    for step, value in enumerate(values, start=1):
        course.add({"step": step, key: value} | others)
    return course


def test_the_noise_of_a_mean_is_that_of_its_values_whatever_their_trend():
    """Windows of 10 values with deviation 0.3 on a slope of 0.02 a step: the mean has 0.3 / sqrt(10)."""
    random = np.random.default_rng(0)
    found = [
        course_of(0.02 * np.arange(60) + random.normal(0, 0.3, 60)).now("x").stderr for _ in range(200)
    ]  # fmt: skip
    assert np.mean(found) == pytest.approx(0.3 / math.sqrt(WINDOW), rel=0.15)
    assert min(found) > 0.6 * 0.3 / math.sqrt(WINDOW)  # no window is quiet by luck


def test_a_known_error_is_the_least_that_counts():
    course = Course()
    for step in range(1, 20):
        course.add({"step": step, "reward": 0.5, "reward_stderr": 0.1})
    assert course.now("reward").stderr == pytest.approx(0.1 / math.sqrt(WINDOW))


def test_windows_follow_one_another_and_the_newest_is_of_the_last_values():
    course = course_of(range(1, 26))
    assert [mean[0] for mean in course.past("x", 26)] == [5.5, 15.5]
    assert course.now("x")[0] == 20.5
    assert (course.now("x").first, course.now("x").last) == (16, 25)
    assert course.past("x", course.now("x").first)[-1].last == 10
    assert course.now("x", 30) is None


def test_what_the_newest_step_lacks_says_nothing_now():
    course = course_of([1.0] * 20)
    course.add({"step": 21, "x": None})
    assert course.now("x") is None
    assert course.value("x") is None


@pytest.mark.parametrize("value", [None, math.nan, math.inf, True, "0.5", [1], 10**400, 1e200])
def test_what_is_no_number_of_use_is_none(value):
    assert finite(value) is None


def test_standard_errors_apart():
    assert Mean(1.0, 0.3, 0, 0).above(Mean(0.0, 0.4, 0, 0)) == pytest.approx(2.0)
    assert Mean(1.0, 0.0, 0, 0).above(Mean(0.0, 0.0, 0, 0)) == math.inf
    assert Mean(1.0, 0.0, 0, 0).above(Mean(1.0, 0.0, 0, 0)) == 0


def test_a_reward_that_stands_still_has_stalled_and_one_that_rises_has_not():
    random = np.random.default_rng(1)
    noise = random.normal(0, 0.02, 100)
    assert course_of(0.4 + noise, "reward").stalled_since(0)
    assert not course_of(0.4 + 0.004 * np.arange(100) + noise, "reward").stalled_since(0)
    assert not course_of(0.4 + noise[:15], "reward").stalled_since(0)  # too early to say


def test_the_newest_window_beyond_a_factor():
    course = course_of([8.0] * 10 + [4.0] * 10 + [1.0] * 20)
    assert course.last_beyond("x", course.now("x"), 4.0).last == 20
    assert course.last_beyond("x", course.now("x"), 5.0).last == 10
    assert course.last_beyond("x", course.now("x"), 9.0) is None
    assert course_of([1.0] * 10 + [4.0] * 20).last_beyond("x", Mean(4.0, 0, 21, 30), 0.5).last == 10


def test_memory_does_not_grow_with_the_run():
    course = course_of(range(5 * POOLED))
    assert len(course.columns["x"].last) == POOLED
    assert len(course.columns["x"].windows) == 5 * POOLED // WINDOW
