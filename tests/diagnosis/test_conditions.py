"""What is found in synthetic runs, and when; and that healthy ones have no alarm."""

import math
import re

import numpy as np
import pytest
import torch

from lab.alarms.synthetic import ILLNESSES, healthy, ill, uneven
from lab.alarms.uneven import of_rewards
from oblrpo.diagnosis import CONDITIONS, Facts, Watch, diagnose
from oblrpo.estimators import baseline
from oblrpo.estimators.baselines import random_inputs
from oblrpo.tables.baselines import BASELINES

ILL = {illness.finds for _, illness in ILLNESSES.values()}


def alarms(rows, **facts):
    return [finding for finding in Watch(Facts(**facts)).over(rows).findings if finding.wrong]


@pytest.mark.parametrize("name", ILLNESSES)
def test_an_illness_is_found_in_time_and_nothing_before_it(name):
    """And is the one cause that is told, with one cure."""
    onset, illness = ILLNESSES[name]
    after, first = [], 0
    for seed in range(5000, 5006):
        watch = Watch().over(ill(name, seed))
        assert not [finding for finding in watch.findings if finding.wrong and finding.found <= onset]
        after += [watch.found[illness.finds].found - onset] if illness.finds in watch.found else []
        first += [finding.name for finding in watch.findings if finding.wrong] == [illness.finds]
    assert min(first, len(after)) >= 5 - (name == "reward falls")  # of six: where noise hides it, it is not told
    assert np.median(after) <= illness.within


def test_healthy_runs_have_no_alarm():
    for seed in range(6000, 6040):
        assert not alarms(healthy(seed)), seed


def test_rewards_as_uneven_as_honest_ones_are_have_none():
    for seed in range(6000, 6020):
        assert not alarms(uneven(seed)), seed


def test_healthy_runs_that_are_logged_every_fifth_step_have_none_either():
    """TRL logs the mean over `logging_steps`."""
    for seed in range(7000, 7010):
        rows = healthy(seed)
        parts = [rows[start : start + 5] for start in range(0, len(rows), 5)]
        means = [{key: float(np.mean([row[key] for row in part if key in row])) for key in part[-1]} for part in parts]
        assert not alarms(means), seed


def test_every_alarm_has_an_illness_that_it_is_found_in():
    assert {condition.name for condition in CONDITIONS if condition.wrong} == ILL


def test_names_docstrings_and_columns_are_there():
    assert len({condition.name for condition in CONDITIONS}) == len(CONDITIONS)
    for condition in CONDITIONS:
        assert condition.columns, condition.name
        assert condition.threshold >= condition.healthy
        assert len(condition.about) > 60, condition.name
        assert re.search(r"\w\.$", condition.cure) or condition.cure.endswith(("}.", ").")), condition.cure


@pytest.mark.parametrize("name", [name for name, entry in BASELINES.items() if entry.trainable])
def test_baselines_that_look_across_prompts_are_those_that_learn_from_a_silent_one(name):
    """A prompt whose completions all earn 1, among others that earn less."""
    rewards_PG = torch.tensor([[1.0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    inputs = random_inputs(4, 4, 3, torch.Generator().manual_seed(0))
    advantages_PG = rewards_PG - baseline(
        name, rewards_PG, **{key: inputs[key] for key in BASELINES[name].needs if key in inputs}
    )
    assert bool((advantages_PG[0].abs() > 1e-6).any()) == BASELINES[name].learns_from_ties


def test_silent_groups_are_harmless_under_a_baseline_that_looks_across_prompts():
    random = np.random.default_rng(0)
    shares, rewards = random.normal(0.76, 0.1, 100).clip(0, 1), random.normal(0.4, 0.03, 100)
    rows = [{"reward": r, "frac_reward_zero_std": share} for r, share in zip(rewards, shares, strict=True)]
    assert "silent groups" in {finding.name for finding in alarms(rows)}
    assert "silent groups" not in {finding.name for finding in alarms(rows, looks_across=True)}


def test_prompts_that_are_used_up_are_no_alarm():
    """A run that has solved its task."""
    rows = [{"step": n, "reward": min(0.97, 0.3 + n / 60), "reward_std": 0.4 if n < 30 else 0.05,
             "frac_reward_zero_std": min(0.95, n / 40)} for n in range(1, 150)]  # fmt: skip
    found = Watch().over(rows)
    assert [finding.name for finding in found.findings] == ["prompts used up"]
    assert "risen to 0.97" in found.findings[0].sentence


@pytest.mark.parametrize("chance", [0.002, 0.005, 0.01, 0.02, 0.1, 0.5])
def test_what_chance_does_is_no_fall(chance):
    """64 prompts x 4 completions of a policy that does not change, 200 steps, 10 runs; rare successes leave steps of
    zeros, whose standard error is 0."""
    random = np.random.default_rng(0)
    for _ in range(10):
        rewards = random.binomial(4, chance, (200, 64)) / 4
        stderr = rewards.std(1, ddof=1) / 8
        rows = [{"reward": r, "reward_stderr": e} for r, e in zip(rewards.mean(1), stderr, strict=True)]
        assert "reward fell" not in {finding.name for finding in alarms(rows)}


def test_a_fall_is_measured_by_what_was_gained():
    """Rewards may be negative, and cross 0, where a share of the best is nothing."""

    def fell(*rewards):
        return "reward fell" in {finding.name for finding in alarms([{"reward": reward} for reward in rewards])}

    rise = [-0.6 + 0.02 * step for step in range(32)]
    assert not fell(*rise, *[-0.05] * 15)
    assert fell(*rise, *[-0.4] * 15)
    assert not fell(*[-0.4] * 12, *[-0.45] * 12)
    assert fell(*[-0.4] * 12, *[-0.9] * 12)


def test_a_rate_that_a_scheduler_brings_down_is_not_lost():
    for T in (60, 200, 1000):
        linear = [{"learning_rate": 1e-3 * (1 - t / T)} for t in range(T)]
        cosine = [{"learning_rate": 1e-3 * (1 + math.cos(math.pi * t / T))} for t in range(T)]
        assert not alarms(linear)
        assert not alarms(cosine)


def test_a_measured_rate_follows_no_signal_that_could_be_lost():
    rows = [{"lr_factor": 1e-9**step, "learning_rate": 1e-3 * 1e-9**step} for step in range(30)]
    assert not alarms(rows, measured_rate=True)
    assert [finding.name for finding in alarms(rows)] == ["rate collapsed"]


def test_baselines_near_0_may_spread_ten_times_as_wide():
    rows = [{"baseline/spread": 0.002, "reward_std": 0.4}] * 12
    assert not alarms([*rows, {"baseline/spread": 0.03, "reward_std": 0.4}])
    assert not alarms([{"baseline/spread": 0.0}] * 11 + [{"baseline/spread": 0.05}])  # the first success
    assert not alarms([{"baseline/spread": 100.0**step} for step in range(10)])  # too early to say
    learns = [{"baseline/spread": 0.003, "reward": 0.03, "reward_std": 0.1}] * 20
    assert not alarms([*learns, {"baseline/spread": 0.34, "reward": 0.3, "reward_std": 0.2}])  # of other prompts 0
    assert alarms([*learns, {"baseline/spread": 3.4, "reward": 0.3, "reward_std": 0.2}])


def test_completions_that_are_all_cut_from_the_start_are_meant_to_be():
    rows = [{"step": n, "reward": 0.4 + n % 2 / 1000, "completions/clipped_ratio": 1.0} for n in range(1, 100)]
    assert "truncation" not in {finding.name for finding in alarms(rows)}
    some = [row | {"completions/clipped_ratio": 0.4} for row in rows]
    assert "truncation" in {finding.name for finding in alarms(some)}


@pytest.mark.parametrize("one", [1e30, -1e30, 1e4])
def test_an_outlying_reward_is_named(one):
    """Of one completion of 32; and first, before the gradient that it makes, which is cured by no lower rate."""
    random = np.random.default_rng(0)
    rows = [{"step": n, "reward": 0.4 + random.normal(0, 0.05), "grad_norm": 0.5} for n in range(1, 60)]
    rows[49] |= {"reward": one / 32, "grad_norm": math.inf}
    first = diagnose(rows).findings[0]
    assert (first.name, first.found, first.until) == ("outlying reward", 50, 50)
    assert f"the mean of step 50 was {one / 32:.3g}; in the 49 before it was between 0.2" in first.sentence
    assert "rate" not in first.cure
    quiet = [{"reward": 0.4 + n % 2 / 1e6 - 0.3 * (n > 30)} for n in range(60)]
    assert "outlying reward" not in {finding.name for finding in alarms(quiet)}
    rare = [{"reward": wins.mean(), "reward_std": wins.std()} for wins in random.binomial(1, 0.002, (60, 256))]
    assert "outlying reward" not in {finding.name for finding in alarms(rare)}


def after(count, before, then):
    """Rows whose rewards of four prompts change at once, from one distribution to another."""
    random = np.random.default_rng(0)
    drawn = [(before if n < count else then)(random) for n in range(count + 30)]
    return [of_rewards(F_PG) | {"step": n} for n, F_PG in enumerate(drawn)]


def won(chance, paid=1.0, shaping=0.0):
    return lambda random: paid * random.binomial(1, chance, (4, 4)) + random.normal(shaping, shaping / 5, (4, 4))


@pytest.mark.parametrize(
    "rows",
    [
        after(50, won(0), won(0.05)),  # the first success
        after(50, won(0, shaping=0.01), won(0.1, paid=10, shaping=0.01)),
        after(50, won(0.01), won(0.98)),  # solved at once
        after(50, won(0, shaping=0.1), won(1.0, paid=100, shaping=0.1)),
        after(50, won(1, paid=-0.01), won(1, paid=-1)),
        [*after(60, won(0.05), won(0))[:59], {"reward": 0.25, "reward_std": 0.2}],
        after(20, won(0, paid=1e4), won(0.02, paid=1e4)),  # of two values none is
        after(20, won(0.06, paid=1e4, shaping=0.1), won(0.2, paid=1e4, shaping=0.1)),
    ],
)
@pytest.mark.parametrize("logged", [{"reward", "reward_std"}, {"reward", "reward_min", "reward_max"}, None])
def test_a_success_is_no_outlying_reward(rows, logged):
    rows = [{key: value for key, value in row.items() if not logged or key in logged} for row in rows]
    assert "outlying reward" not in {finding.name for finding in diagnose(rows).findings}


def test_outlying_rewards_are_counted():
    rows = [{"step": n, "reward": 0.4, "reward_std": 0.1, "reward_min": -900.0 * (n % 20 == 10), "reward_max": 1.0,
             "reward_iqr": 0.2} for n in range(1, 60)]  # fmt: skip
    finding = next(each for each in alarms(rows) if each.name == "outlying reward")
    assert (finding.since, finding.found, finding.until) == (10, 10, 50)
    assert finding.sentence == (
        "Outlying rewards, 3 times since step 10: those of step 10 range from -900 to 1, 4.5e+03 times as far from "
        "their mean as usual."
    )


def test_a_rate_that_rises_from_next_to_nothing_is_not_stuck():
    """By 1.5 a step, as under schedule kl; and the end of a cosine is none, in which steps are short for a fifth."""
    rows = [{"step": n, "reward": 0.3, "entropy": 1.0, "learning_rate": 1e-6 * 1.5**n, "step_kl_target": 0.5,
             "step_kl": min(0.5, 1e-10 * 2.25**n)} for n in range(30)]  # fmt: skip
    assert sum(row["step_kl"] < 0.005 for row in rows) > 20
    cosine = [(1 + math.cos(math.pi * n / 100)) / 2 for n in range(100)]
    ended = [{"step": n, "reward": 0.3, "entropy": 1.0, "learning_rate": decay, "step_kl_target": 0.5,
              "step_kl": 0.5 * decay**2} for n, decay in enumerate(cosine)]  # fmt: skip
    assert sum(row["step_kl"] < 0.005 for row in ended) > 15
    for run in (rows, ended):
        assert "steps too short" not in {finding.name for finding in alarms(run)}


@pytest.mark.parametrize("extra", [{"reward_std": 0.5}, {"reward_max": 1.0, "reward_min": 0.0}])
@pytest.mark.parametrize(("mean", "told"), [(0.0, True), (0.5, False), (1.0, False)])
def test_a_mean_that_is_constant_by_rounding_is_told_early_at_the_bottom_alone(mean, told, extra):
    rows = [{"step": n, "reward": mean, "grad_norm": 0.1 + n % 3} | extra for n in range(30)]
    assert [finding.name for finding in diagnose(rows).findings] == ["no progress"] * told


def test_parts_of_the_reward_by_the_names_of_our_own_metrics():
    random = np.random.default_rng(0)
    means = [[min(0.99, 0.3 + n / 40), max(0.1, 0.5 - n / 150)] for n in range(120)]
    rows = [
        {"step": n, "skipped": 0.0, "lr_factor": 1.0, "step_kl": 0.01, "reward": form + task, "reward_stderr": 0.02}
        | {"rewards/format/mean": form, "rewards/format/std": 0.1, "rewards/correct/mean": task}
        for n, (form, task) in enumerate(random.normal(means, 0.01))
    ]  # fmt: skip
    assert "task traded" in {finding.name for finding in alarms(rows, measured_rate=True)}
    assert "format saturated" in {each.name for each in diagnose(rows).findings[0].follows}


def test_a_gradient_that_jumps_once_by_thirty_is_told_and_by_five_is_not():
    random = np.random.default_rng(0)
    norms = np.exp(random.normal(0, 0.3, 60))
    for times, told in ((100, True), (5, False)):
        rows = [{"grad_norm": norm * (times if step == 50 else 1)} for step, norm in enumerate(norms)]
        assert bool(alarms(rows)) is told


def test_far_below_and_far_above_the_critical_batch_is_worth_knowing_and_not_wrong():
    random = np.random.default_rng(0)
    for signal, name in ((0.0, "batch far below"), (1.0, "batch far above")):
        rows = [
            {"step": n, "reward": 0.4 + 0.001 * n, "signal2": signal + random.normal(0, 0.0002), "trace_cov": 1.0}
            for n in range(40)
        ]
        found = Watch(Facts(prompts=32)).over(rows).findings
        assert [(finding.name, finding.wrong) for finding in found] == [(name, False)]


def test_how_sure_and_since_when():
    rewards = [0.5 * (n < 30) + n % 2 / 1000 for n in range(60)]
    (finding,) = diagnose([{"step": n, "reward": reward, "kl": None} for n, reward in enumerate(rewards)]).findings
    assert finding.name == "reward fell"
    assert 30 <= finding.found <= 36
    assert finding.until == 59
    assert finding.plain()["since"] == finding.since == finding.found - 9
    assert re.fullmatch(r"not chance \(\d+ standard errors\)", finding.sure)
    since, found = finding.since, finding.found
    assert finding.when == f"since step {since}; first reported after step {found}, last seen after step 59"
    (skipped,) = diagnose([{"step": 1, "skipped": 1.0}]).findings
    assert (skipped.sure, skipped.when) == ("not chance (counted)", "in step 1")


def test_what_a_log_lacks_is_said():
    found = diagnose([{"step": n, "reward": 0.1 * n} for n in range(30)])
    assert "entropy collapsed" in found.unchecked
    assert "reward fell" not in found.unchecked
    *_, said = str(found).split("\n\n")
    assert said.startswith(f"Not checked: {len(found.unchecked)} conditions (--json lists them). The log lacks ")
    assert "entropy" in said
    assert max(map(len, said.splitlines())) <= 100
    assert "No problem found." in str(found)
    assert "in fewer than 20 steps." in str(diagnose([{"step": 1, "reward": 1.0}]))
    found = diagnose([{"grad_norm": 0.1 + n % 3, "score": 0.0} for n in range(30)])
    assert "No problem found, as far as a log without a reward shows." in str(found)


def test_nothing_in_a_row_ends_a_watch():
    """Values of every size, of every kind and none, in all columns at once or in some: what trains must go on."""
    random = np.random.default_rng(0)
    keys = sorted({key for condition in CONDITIONS for key in condition.columns if "*" not in key})
    keys += ["rewards/a/mean", "rewards/b/c/mean", "snr", "n_snr", "lr_factor", "reward_stderr", "learning_rate"]
    values = [0.0, 1.0, -1.0, 1e-300, 1e149, -1e149, 1e200, math.nan, math.inf, None, "x", True, [1]]
    for facts in (Facts(), Facts(True, True, True, 32), Facts(corrects_sampler=False)):
        for _ in range(20):
            watch, chosen = Watch(facts), [key for key in keys if random.random() < 0.7]
            few = [values[place] for place in random.integers(len(values), size=3)]
            for step in range(90):
                row = {key: few[int(random.integers(3))] for key in chosen if random.random() < 0.95}
                watch.observe(row | ({"step": step} if random.random() < 0.9 else {}))
            assert str(watch.findings)


def test_the_number_of_steps_that_a_trend_takes_to_be_seen():
    """As many as make the rise of a line three standard errors, by the formula of the error of a slope."""
    random = np.random.default_rng(3)
    rows = [{"reward": 0.4 + 0.00002 * n + random.normal(0, 0.02), "reward_std": 0.45} for n in range(120)]
    sentence = Watch().over(rows[:100]).found["no progress"].sentence
    steps = int(re.search(r"about (\d+) steps in all", sentence)[1])
    rewards = np.array([row["reward"] for row in rows[:100]]).reshape(10, 10).mean(1)
    trend = np.polyfit(np.arange(10), rewards, 1)[0] / 10  # a step
    deviation = 0.02 / math.sqrt(((np.arange(steps) - (steps - 1) / 2) ** 2).sum())  # of a slope over so many steps
    assert trend / deviation == pytest.approx(3, rel=0.4)  # the noise is estimated
