"""Means of windows and their noise."""

import math

import numpy as np
import pytest

from lab.alarms.logged import thinned
from lab.alarms.synthetic import ILLNESSES, healthy, ill
from oblrpo.diagnosis import Facts, Watch
from oblrpo.diagnosis.course import MOST_WINDOWS, POOLED, WINDOW, Course, Mean, finite


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


@pytest.mark.parametrize("since", [0, 20])
def test_a_standstill_takes_the_two_windows_that_its_means_are_taken_over(since):
    """The newest begins a window after the middle of the time since the step, before which the other one ends."""
    course, stalled = Course(), []
    for step in range(1, 80):
        course.add({"step": step, "reward": 0.5 + 0.1 * (-1) ** step})
        stalled += [step] * course.stalled_since(since)
    first = next(n for n in range(80) if n - WINDOW + 1 >= (since + n) // 2 + WINDOW)
    assert stalled == list(range(first, 80))


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


@pytest.mark.parametrize(
    ("every", "window", "long"), [(1, 10, 20), (2, 5, 10), (3, 4, 7), (5, 3, 4), (10, 3, 3), (500, 3, 3)]
)
def test_windows_count_steps_and_have_three_rows_at_least(every, window, long):
    course = Course(Facts(every=every))
    assert (course.window, course.long, course.span) == (window, long, window * every)
    assert course.words["window"] == f"{window * every} steps"
    for step in range(every, 20 * every + 1, every):
        course.add({"step": step, "x": float(step)})
    assert course.now("x").first == (21 - window) * every
    assert course.columns["x"].windows[0].last == window * every


def test_rows_are_called_rows_where_a_log_names_no_steps():
    course = Course(Facts(unit="row"))
    assert (course.said(1), course.said(3), course.words["window"]) == ("1 row", "3 rows", "10 rows")
    assert Course(Facts(every=10)).said(1) == "10 steps"


def test_steps_are_those_of_the_log_with_a_reward_or_without():
    missing = course_of([0.1] * 12, "loss")
    for step in range(13, 20):
        missing.add({"step": step, "reward": 0.5, "eval/accuracy": 0.1})
    assert missing.steps == 12
    for first, last in ((10, 600), (510, 1000)):
        course = Course(Facts(every=10))
        for step in range(first, last + 1, 10):
            course.add({"step": step, "reward": 0.5})
        assert course.steps == last - first + 10
    course.add({"step": 1003, "eval/accuracy": 0.5})
    assert course.steps == 500


def test_what_was_measured_of_one_step_is_less_of_the_mean_of_many():
    course = Course(Facts(every=16))
    for step in range(16, 400, 16):
        course.add({"step": step, "reward": 0.5, "reward_stderr": 0.1})
    assert course.now("reward").stderr == pytest.approx(0.1 / 4 / math.sqrt(3))


@pytest.mark.parametrize("every", [5, 10])
def test_a_run_that_is_logged_every_few_steps_is_judged_at_most_three_times_later(every):
    for name, latest in {
        "reward falls": 23,
        "length times four": 38,
        "KL runs away": 25,
        "no reward at all": 7,
    }.items():
        onset, illness = ILLNESSES[name]
        for seed in (30, 31):
            found = Watch(Facts(every=every)).over(ill(name, seed, every)).found[illness.finds].found
            assert 0 < found - every * onset <= 3 * latest, (name, seed)


@pytest.mark.parametrize("every", [2, 5, 10])
def test_runs_that_are_well_have_no_alarm_however_they_are_logged(every):
    for rows in (healthy(50, every), thinned(healthy(51), every), thinned(healthy(52), every)):
        assert not [each for each in Watch(Facts(every=every)).over(rows).findings if each.wrong]


def test_a_standstill_is_over_when_the_reward_has_risen():
    random = np.random.default_rng(0)
    rise = [0.2 + 0.3 * min(1.0, max(0.0, (n - 150) / 100)) + random.normal(0, 0.02) for n in range(1200)]
    rows = [{"reward": reward, "reward_std": 0.4} for reward in rise]
    assert "no progress" in {each.name for each in Watch().over(rows[:150]).findings if each.wrong}
    assert not [each for each in Watch().over(rows).findings if each.wrong]  # nor is a long level after it


def test_a_long_log_is_read_in_linear_time_and_loses_no_single_row():
    """Windows are looked at every thousandth of the run; of 7,000 rows one overflows, and in six all earn 0."""
    random = np.random.default_rng(0)
    watch, looked = Watch(), 0
    for step, reward in enumerate(0.5 + random.normal(0, 0.03, 7_000), start=1):
        down = 6_000 <= step < 6_006
        watch.observe({"step": step, "reward": 0.0 if down else float(reward), "reward_std": 0.0 if down else 0.3,
                       "grad_norm": 1.0, "skipped": float(step == 6_501)})  # fmt: skip
        looked += watch.course.compared == step
    assert looked < 5_000 + 1_000 * math.log(7_000 / 5_000) * 1.2
    assert {len(column.windows) < MOST_WINDOWS for column in watch.course.columns.values()} == {True}
    assert {"same reward", "not finite"} <= watch.found.keys()
    assert watch.found["same reward"].sentence.endswith("reward, 0 in steps 6000 to 6005.")
    assert watch.found["not finite"].found == 6_501


def test_a_long_run_remembers_how_it_began_and_its_best():
    rewards = [0.1 + 0.8 * min(n, 6_000) / 6_000 - 0.5 * (n > 9_000) + n % 2 / 100 for n in range(12_000)]
    course = course_of(rewards, "reward")
    windows = course.past("reward", course.now("reward").first)
    assert MOST_WINDOWS / 2 < len(windows) < MOST_WINDOWS
    assert (windows[0].last, max(windows).value) == (10, pytest.approx(0.9, abs=0.01))
    assert [mean.last for mean in windows] == sorted(mean.last for mean in windows)
    assert windows[0].value < 0.11
    found = Watch().over({"reward": reward} for reward in rewards[6_000:]).found["reward fell"]
    assert 3_000 < found.found < 3_020
