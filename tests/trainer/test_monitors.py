import math
import re

import numpy as np
import pytest

from oblrpo.report.advice import advice
from oblrpo.trainer.monitors import PATIENCE, SHRUNK, Monitors

FINE = {
    "reward": 0.5,
    "reward_stderr": 0.02,
    "reward_std": 0.4,
    "frac_reward_zero_std": 0.2,
    "lr_factor": 0.5,
    "critical_batch_size": 40.0,
    "n_snr": 0.4,
    "baseline/spread": 0.3,
}


def told(rows):
    monitors = Monitors()
    return [monitors.observe(row) for row in rows]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lr_factor": 1e-4}, "learning rate has been at most 1% of its highest for 10 steps.*about 40 prompts"),
        ({"lr_factor": 0.0, "critical_batch_size": math.inf}, "lost in its noise. Raise prompts_per_step"),
        ({"frac_reward_zero_std": 0.95, "reward": 0.3}, "taught nothing .*choose easier prompts"),
        ({"frac_reward_zero_std": 1.0, "reward": 0.99}, "choose harder prompts"),
    ],
)
def test_a_lasting_failure_is_told_once(change, word):
    said = told([FINE] * 3 + [FINE | change] * (PATIENCE + 30))
    assert not any(said[: 3 + PATIENCE - 1])
    ((message,),) = [messages for messages in said if messages]
    assert re.search(word, message)
    assert said[3 + PATIENCE - 1] == [message]


def test_a_fallen_policy_is_told_once_and_not_sent_to_easier_prompts():
    """Its rewards become flat, too; that is not what is to be mended."""
    rows = [FINE] * 15 + [FINE | {"reward": 0.01, "frac_reward_zero_std": 0.99}] * 30
    for schedule, mend in (("off", "a third of learning_rate, or schedule auto"), ("auto", "lower schedule_kl")):
        monitors = Monitors(schedule=schedule)
        ((message,),) = [said for said in map(monitors.observe, rows) if said]
        assert re.search(f"mean reward of the last 10 steps is 0.2.*was 0.500 at its best.*{mend}", message)


@pytest.mark.parametrize("chance", [0.002, 0.005, 0.01, 0.02, 0.1, 0.5])
def test_what_chance_does_is_no_fall(chance):
    """64 prompts x 4 completions of a policy that does not change, 200 steps, 20 runs; rare successes leave steps of
    zeros, whose standard error is 0."""
    random = np.random.default_rng(0)
    for _ in range(20):
        rewards = random.binomial(4, chance, (200, 64)) / 4
        stderr = rewards.std(1, ddof=1) / 8
        rows = [FINE | {"reward": r, "reward_stderr": e} for r, e in zip(rewards.mean(1), stderr, strict=True)]
        assert not any(told(rows))


def test_a_fall_is_measured_by_what_was_gained():
    """Rewards may be negative, and cross 0, where half of the best is nothing."""
    rise = [FINE | {"reward": -0.6 + 0.02 * step} for step in range(32)]
    assert not any(told([*rise, *[FINE | {"reward": -0.1}] * 15]))
    assert sum(map(bool, told([*rise, *[FINE | {"reward": -0.4}] * 15]))) == 1
    assert not any(told([FINE | {"reward": reward} for reward in (-0.4, -0.5) for _ in range(12)]))
    assert sum(map(bool, told([FINE | {"reward": reward} for reward in (-0.4, -0.9) for _ in range(12)]))) == 1


def test_a_fall_whose_noise_is_not_known_is_not_told():
    for unknown in (None, math.nan):  # one prompt a step
        assert not any(
            told([FINE | {"reward": reward, "reward_stderr": unknown} for reward in [0.5] * 12 + [0.0] * 12])
        )


def test_flat_rewards_that_may_be_a_fall_say_so():
    """Of so few completions that chance could have done it."""
    few = FINE | {"reward_stderr": 0.3}
    rows = [few] * 12 + [few | {"reward": 0.05, "frac_reward_zero_std": 0.95}] * 15
    assert "was 0.50 at its best: or lower the rate" in str(told(rows))
    assert "or lower the rate" not in str(told([FINE | {"frac_reward_zero_std": 0.95}] * 15))


def test_flat_rewards_are_told_where_the_fall_is_over():
    fall = [FINE] * 12 + [FINE | {"reward": 0.05}] * 12
    rows = [*fall, *[FINE] * 15, *[FINE | {"reward": 0.9, "frac_reward_zero_std": 0.95}] * 15]
    assert ["fallen" in text for said in told(rows) for text in said] == [True, False]


def test_a_passing_failure_is_not_told():
    rows = [FINE | {"lr_factor": 1e-9, "frac_reward_zero_std": 1.0}] * (PATIENCE - 1)
    assert not any(told([FINE, *rows, FINE, *rows]))


def test_a_factor_that_was_never_above_zero_has_collapsed():
    said = told([FINE | {"lr_factor": 0.0, "critical_batch_size": math.inf}] * (PATIENCE + 5))
    assert [bool(messages) for messages in said] == [False] * (PATIENCE - 1) + [True] + [False] * 5


@pytest.mark.parametrize("schedule", ["auto", "kl"])
def test_a_measured_rate_follows_no_signal_that_could_be_lost(schedule):
    """Its factor is over a start that may be far too high."""
    monitors = Monitors(schedule=schedule)
    assert not any(monitors.observe(FINE | {"lr_factor": 1e-9**step}) for step in range(3 * PATIENCE))


def test_baselines_that_grow_slowly_explode_in_the_end():
    """2 % a step: the median of all steps so far falls behind."""
    assert sum(map(bool, told([FINE | {"baseline/spread": 0.3 * 1.02**step} for step in range(300)]))) == 1


def test_exploding_baselines_are_told_at_once():
    said = told([FINE] * PATIENCE + [FINE | {"baseline/spread": 3.1}] * 2)
    assert "10 times as wide" in said[PATIENCE][0]
    assert not said[PATIENCE + 1]
    assert not any(told([FINE] * PATIENCE + [FINE | {"baseline/spread": 2.9}]))
    assert not any(told([FINE | {"baseline/spread": 100.0 * step} for step in range(PATIENCE)]))  # too early to say
    near_zero = FINE | {"baseline/spread": 0.002}
    assert not any(told([near_zero] * PATIENCE + [near_zero | {"baseline/spread": 0.03}]))  # rewards vary by more


def test_who_shrinks_is_not_told_to():
    rows = [FINE] * PATIENCE + [FINE | {"baseline/spread": 3.1}]
    for baseline, advised in (("oblr", True), ("oblr_shrunk", False)):
        monitors = Monitors(baseline=baseline)
        said = [monitors.observe(row) for row in rows][-1][0]
        assert ("take the baseline oblr_shrunk" in said) is advised


def test_values_read_back_from_the_disk_may_be_missing():
    rows = [{"step": 0, "eval/accuracy": 0.1}, FINE | {"baseline/spread": None, "critical_batch_size": None}]
    assert not any(told(rows * 20))
    for unknown in (None, math.nan):
        collapsed = FINE | {"lr_factor": 0.0, "critical_batch_size": unknown}
        ((message,),) = [said for said in told([FINE] + [collapsed] * 20) if said]
        assert "critical batch" not in message


def test_a_rate_that_a_scheduler_brings_down_has_not_collapsed():
    rows = [FINE | {"learning_rate": 1e-3 * (1 + math.cos(math.pi * t / 1000))} for t in range(1000)]
    assert not any(told(rows))


def test_the_first_success_after_many_failures_is_no_explosion():
    assert not any(told([FINE | {"baseline/spread": 0.0}] * 11 + [FINE | {"baseline/spread": 0.05}]))


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_one_completion_a_prompt_says_nothing_about_flat_rewards(nothing):
    assert not any(told([FINE | {"frac_reward_zero_std": nothing}] * 20))


def test_what_was_told_before_a_resume_is_not_told_again():
    rows = [FINE] + [FINE | {"lr_factor": 0.0}] * 20
    monitors = Monitors()
    for row in rows:
        monitors.observe(row)
    assert not monitors.observe(rows[-1])


def test_advice_on_the_batch():
    assert advice(128, 0.6) == (
        "your 128 prompts are 0.6x the critical batch of 213: doubling them would buy about 1.45x the progress of a "
        "step, and less over many; halving them leaves 0.62x, and more"
    )
    assert "no signal above the noise" in advice(32, 0.0)
    for nothing in (math.nan, None):
        assert "gave no gradient" in advice(32, nothing)


def test_a_step_without_any_reward_is_told_at_once_and_once():
    nothing = FINE | {"step": 1, "reward": 0.0, "reward_stderr": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    nothing |= {"grad_norm": 0.0, "lr_factor": 0.0, "n_snr": None, "critical_batch_size": None}
    said = told([nothing] + [nothing | {"step": n} for n in range(2, 40)])
    assert re.search("no completion of step 1 earned a reward.*completions/step_1.jsonl.*mend the reward", said[0][0])
    assert [len(each) for each in said] == [1] + [0] * 38
    equal = nothing | {"reward": 1.0, "step": 7}
    ((message,),) = told([equal])
    assert re.search(r"in step 7 all completions of a prompt earned the same \(mean reward 1.00\)", message)


def test_updates_lost_in_rounding_are_told():
    lost = FINE | {"step_kl": 0.0, "grad_norm": 0.3, "learning_rate": 1e-30}
    said = told([lost] * (2 * PATIENCE))
    assert "1.0e-30, changed no log-probability: they are lost in rounding" in said[PATIENCE - 1][0]
    assert sum(map(len, said)) == 1
    assert not any(told([lost | {"step_kl": 1e-9}] * (2 * PATIENCE)))


@pytest.mark.parametrize("key", SHRUNK)
def test_entropy_or_length_that_is_gone_is_told_once(key):
    """Not while it falls, not if rewards have risen meanwhile, and not if it was never there."""
    many = [FINE | {key: 50.0}] * 12
    gone = [FINE | {key: 0.1}] * (2 * PATIENCE)
    said = told(many + gone)
    ((message,),) = [messages for messages in said if messages]
    assert not any(said[: 12 + PATIENCE - 3])
    assert re.search(f"collapsed: the mean of {key} over 10 steps is .*, and was 50 at its highest", message)
    assert not any(told(many + [row | {"reward": 0.6} for row in gone]))
    assert not any(told([FINE | {key: 0.0}] * 30))
    assert not any(told([FINE | {key: None}] * 30))


@pytest.mark.parametrize("change", [{"entropy": 0.001}, {"completions/mean_length": 1.0}, {"reward": 0.01}])
def test_a_collapse_stops_a_run_that_asks_for_it(change):
    row = FINE | {"entropy": 1.0, "completions/mean_length": 30.0, "step": 1}
    for asked in (False, True):
        monitors = Monitors(stop_on_collapse=asked)
        stops = []
        for each in [row] * 12 + [row | change] * 20:
            monitors.observe(each)
            stops.append(bool(monitors.stop))
        assert stops[-1] == asked
        assert not any(stops[:13])


SKIPPED = FINE | {"step": 7, "skipped": 1.0, "learning_rate": 0.0, "grad_norm": None, "frac_reward_zero_std": None}


def test_skipped_steps_are_told_once_and_stop_after_some_in_a_row():
    monitors, fine = Monitors(most_skipped=3), FINE | {"skipped": 0.0}
    (told_once,) = monitors.observe(SKIPPED, "score norm")
    assert "an update of step 7 was skipped (a score norm was NaN or infinite)" in told_once
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
