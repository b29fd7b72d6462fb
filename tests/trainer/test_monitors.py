"""What a run's monitors report while it trains, and what ends it."""

import math
import re

import pytest

from oblrpo.diagnosis import Facts
from oblrpo.trainer.loop import Monitors

FINE = {
    "reward": 0.5,
    "reward_stderr": 0.02,
    "reward_std": 0.4,
    "frac_reward_zero_std": 0.2,
    "lr_factor": 0.5,
    "learning_rate": 1e-3,
    "critical_batch_size": 40.0,
    "n_snr": 0.4,
    "grad_norm": 1.0,
    "baseline/spread": 0.3,
}
NOTHING = FINE | {"reward": 0.0, "reward_stderr": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
SKIPPED = FINE | {"step": 7, "skipped": 1.0, "learning_rate": 0.0, "grad_norm": None, "frac_reward_zero_std": None}


def messages_of(rows, **facts):
    monitors = Monitors(Facts(**facts))
    return [monitors.observe(row | {"step": step}) for step, row in enumerate(rows, start=1)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lr_factor": 1e-4}, "below 1 % of its maximum.*about 40 prompts"),
        ({"lr_factor": 0.0, "critical_batch_size": math.inf}, "the signal is lost in noise: use more prompts per step"),
        ({"reward": 0.01}, "reward has fallen.*from 0.500.*use a third of learning_rate, or let oblrpo measure it"),
        ({"step_kl": 0.0, "learning_rate": 1e-30}, "at a learning rate of 1.0e-30 changed no log-probability"),
        ({"baseline/spread": 3.1}, "10 times the usual one.*or use the baseline oblr_shrunk"),
        ({"completions/masked_ratio": 0.5}, "50% of the completions .* have no reward"),
    ],
)
def test_a_failure_is_reported_once(change, word):
    said = messages_of([FINE] * 12 + [FINE | change] * 40)
    assert not any(said[:12])
    (message,) = next(messages for messages in said if messages)
    assert re.search(word, message)
    assert sum(message in messages for messages in said) == 1


def test_words_are_those_of_the_run():
    fall = [FINE] * 15 + [FINE | {"reward": 0.01}] * 30
    assert "lower schedule_kl" in str(messages_of(fall, measured_rate=True))
    wild = [FINE] * 12 + [FINE | {"baseline/spread": 3.1}]
    assert "use the baseline" not in str(messages_of(wild, looks_across=True))


def test_an_outage_is_reported_once_and_again_when_it_ends():
    harmed = FINE | {"reward": 0.2, "grad_norm": 90.0, "baseline/spread": 9.0}
    said = messages_of([FINE] * 9 + [NOTHING] * 30 + [harmed] * 15 + [NOTHING] * 7 + [FINE] * 15)
    first, end, again, last = (step for step, messages in enumerate(said, start=1) if messages)
    assert (first, end, again, last) == (14, 40, 59, 62)
    words = "same reward: Nothing to learn from: every completion got the same reward, 0 in steps 10 to {}. Check"
    assert said[13][0].startswith(words.format(14))
    assert said[58][0].startswith(words.format("39, 55 to 59"))
    assert len(said[13]) == len(said[58]) == 1
    again = "same reward: rewards differ again since step"
    assert said[39] == [f"{again} 40; every completion of steps 10 to 39 got reward 0"]
    assert said[61] == [f"{again} 62; every completion of steps 55 to 61 got reward 0"]
    assert not any(messages_of([*[NOTHING] * 4, FINE] * 10))


def test_a_collapse_of_the_policy_is_not_laid_to_the_reward():
    """Neither by the console, nor by what ends the run."""
    monitors, messages = Monitors(stop_on_collapse=True), []
    learned = [FINE | {"entropy": 0.6, "reward": reward} for reward in (0.4, 0.5, 0.6) * 5]
    for step, row in enumerate([*learned, *[NOTHING | {"entropy": 3.0}] * 6], start=1):
        messages += monitors.observe(row | {"step": step})
    assert [message.partition(":")[0] for message in messages] == ["policy collapsed"]
    assert monitors.stop.startswith("policy collapsed: The policy has collapsed")  # the name that all others give it
    assert "Updates are too large" in monitors.stop
    assert "Check the reward" not in monitors.stop


@pytest.mark.parametrize("earned", [0.0, 1.0, -1.0, 0.5, 0.37])
def test_an_outage_of_any_reward_stops_a_run_that_requests_it(earned):
    for may_stop in (False, True):
        monitors, stops = Monitors(stop_on_collapse=may_stop), []
        for step, row in enumerate([FINE] * 9 + [NOTHING | {"reward": earned}] * 6, start=1):
            monitors.observe(row | {"step": step})
            stops.append(monitors.stop)
        assert not any(stops[:13])
        begins = f"same reward: Nothing to learn from: every completion got the same reward, {earned:g} in steps 10 to"
        assert [stop.startswith(f"{begins} {n}.") for n, stop in enumerate(stops[13:], start=14)] == [may_stop] * 2


def test_a_task_that_is_solved_is_neither_reported_nor_stopped():
    monitors = Monitors(stop_on_collapse=True)
    rise = [FINE | {"reward": 1 - 0.5 * 0.9**n, "reward_std": 0.4 * 0.9**n} for n in range(40)]
    for step, row in enumerate([*rise, *[NOTHING | {"reward": 1.0, "entropy": 1e-3}] * 40], start=1):
        assert monitors.observe(row | {"step": step}) == []
        assert not monitors.stop
    assert [finding.name for finding in monitors.watch.findings] == ["solved"]


def test_steps_that_are_skipped_because_rewards_agree_are_no_overflow():
    monitors = Monitors(most_skipped=3)
    agreed = NOTHING | {"skipped": 1.0, "learning_rate": 0.0, "lr_factor": 0.0, "entropy": None}
    for step in range(1, 12):
        messages_now = monitors.observe(agreed | {"step": step}, "")
        assert [message for message in messages_now if "NaN" in message] == []
        assert not monitors.stop
    for step in (12, 13, 14):
        monitors.observe(SKIPPED | {"step": step, "reward": 0.0, "reward_std": 0.0, "reward_stderr": 0.0}, "gradient")
    assert "the last 3 steps were skipped (a gradient was NaN" in monitors.stop
    assert "not finite" in monitors.watch.found


def test_a_step_without_rewards_is_reported_at_once():
    masked = FINE | {"frac_prompts_masked": 1.0, "completions/masked_ratio": 0.9, "reward": None, "grad_norm": math.nan}
    assert "90% of the completions of 1 step have no reward. No update was made" in messages_of([masked])[0][0]


def test_values_read_back_from_the_disk_may_be_missing():
    rows = [{"step": 0, "eval/accuracy": 0.1}, FINE | {"baseline/spread": None, "critical_batch_size": None}]
    assert not any(messages_of(rows * 20))
    for unknown in (None, math.nan):
        braked = FINE | {"lr_factor": 0.0, "critical_batch_size": unknown}
        ((message,),) = [said for said in messages_of([FINE] + [braked] * 20) if said]
        assert "critical batch" not in message


def test_what_was_reported_before_a_resume_is_not_reported_again():
    rows = [FINE | {"step": step, "lr_factor": 0.5 if step == 1 else 0.0} for step in range(1, 22)]
    monitors = Monitors()
    for row in rows:
        monitors.observe(row)
    assert not monitors.observe(rows[-1])


def test_what_is_only_worth_knowing_is_not_reported():
    rows = [FINE | {"signal2": 0.0, "trace_cov": 1.0, "n_snr": 0.0, "snr": 0.0}] * 40
    monitors = Monitors(Facts(prompts=32))
    assert not any(monitors.observe(row | {"step": step}) for step, row in enumerate(rows))
    assert {finding.name for finding in monitors.watch.findings} == {"batch far below", "no progress yet"}


@pytest.mark.parametrize("change", [{"entropy": 0.001}, {"completions/mean_length": 1.0}, {"reward": 0.01}])
def test_a_collapse_stops_a_run_that_requests_it(change):
    row = FINE | {"entropy": 1.0, "completions/mean_length": 30.0}
    for may_stop in (False, True):
        monitors = Monitors(stop_on_collapse=may_stop)
        stops = []
        for step, each in enumerate([row] * 15 + [row | change] * 20, start=1):
            monitors.observe(each | {"step": step})
            stops.append(monitors.stop)
        assert bool(stops[-1]) == may_stop
        assert not any(stops[:15])


def test_skipped_steps_are_reported_once_and_stop_after_some_in_a_row():
    monitors, fine = Monitors(most_skipped=3), FINE | {"skipped": 0.0, "step": 7}
    (reported_once,) = monitors.observe(SKIPPED, "score norm")
    assert "NaN or infinite in step 7: score norm." in reported_once
    rows = [SKIPPED, fine, SKIPPED, SKIPPED, SKIPPED, SKIPPED, fine]
    stops = []
    for row in rows:
        assert monitors.observe(row, "score norm") == []
        stops.append(monitors.stop)
    assert [bool(stop) for stop in stops] == [False, False, False, False, True, True, False]
    assert stops[4].startswith("the last 3 steps were skipped (a score norm was NaN or infinite)")


def test_a_resumed_run_counts_the_skipped_steps_before():
    """It has their metrics, without the reason."""
    monitors = Monitors(most_skipped=3)
    for row in (FINE, SKIPPED, SKIPPED):
        monitors.observe(row)
    assert not monitors.stop
    monitors.observe(SKIPPED, "gradient")
    assert "the last 3 steps were skipped (a gradient was NaN" in monitors.stop


def test_a_step_of_which_one_update_was_made_is_none_that_stops():
    monitors = Monitors(most_skipped=2)
    half = FINE | {"step": 3, "skipped": 1.0, "learning_rate": 1e-3}
    assert len(monitors.observe(half, "gradient")) == 1
    assert monitors.observe(half, "gradient") == []
    assert not monitors.stop
