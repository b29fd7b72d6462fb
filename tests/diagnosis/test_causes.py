"""One cause has one cure: what follows from it is named beneath it, and no two cures contradict one another."""

import itertools
import re

import numpy as np
import pytest

from oblrpo.diagnosis import CONDITIONS, Facts, Watch, diagnose
from oblrpo.diagnosis.watch import words_of
from oblrpo.report.console import summary
from oblrpo.trainer.loop import Monitors

WELL = {
    "reward": 0.5, "reward_std": 0.4, "frac_reward_zero_std": 0.2, "grad_norm": 0.5, "kl": 0.01, "entropy": 1.2,
    "loss": 0.01, "completions/mean_length": 100.0, "completions/clipped_ratio": 0.05, "learning_rate": 1e-4,
}  # fmt: skip
SAID = {
    "-learning_rate": r"use a third of learning_rate",
    "+learning_rate": r"[Rr]aise learning_rate|higher learning_rate",
    "+max_completion_length": r"[Rr]aise max_completion_length",
    "-max_completion_length": r"shorten completions|does not favour length",
    "+temperature": r"raise temperature",
    "+prompts": r"more prompts per step",
    "-prompts": r"[Hh]alf as many prompts per step",
}
"""How a cure says what it turns."""


def rows_of_run(count, *changes, seed=0, **values):
    """A run with noise; each change has its first step, and what rows have from then on (of numbers or functions)."""
    random, rows = np.random.default_rng(seed), []
    for step in range(1, count + 1):
        row = WELL | values | {"step": step}
        for first, change in changes:
            row |= {k: v(step - first) if callable(v) else v for k, v in change.items()} if step >= first else {}
        noise = {"reward": random.normal(0, 0.02), "grad_norm": row["grad_norm"] * random.normal(0, 0.1)}
        rows.append(row | {key: row[key] + each for key, each in noise.items() if row.get("reward_std")})
    return rows


def names(rows):
    return {finding.name: [each.name for each in finding.follows] for finding in diagnose(rows).findings}


def falling(steps, low=0.0):
    return lambda since: max(low, 0.5 - 0.5 * since / steps)


def test_turns_are_what_cures_say():
    for condition in CONDITIONS:
        cure = condition.cure.format_map({"shrink": ""} | words_of(measured=False))
        said = {way for way, words in SAID.items() if re.search(words, cure)}
        assert condition.turns == said, condition.name
        assert not condition.opposes(condition), condition.name


def test_causes_are_what_is_wrong():
    for cause in CONDITIONS:
        assert cause.wrong or not cause.brings
        assert cause.brings <= {condition.name for condition in CONDITIONS}


def held_together(chosen, order):
    """A watch that has found these conditions, one a step in that order."""
    from oblrpo.diagnosis.condition import Reading
    from oblrpo.diagnosis.watch import Finding

    watch = Watch()
    for step in order:
        condition = chosen[step]
        reading = Reading(1.0, 0.0, 10 * step + 1, {})
        watch.found[condition.name] = Finding(condition, reading, 10 * step + 10, 90, "", condition.name)
    return watch


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_no_two_conditions_are_told_with_cures_that_contradict(order):
    """All pairs of the table, whichever is found first."""
    for pair in itertools.combinations(CONDITIONS, 2):
        told = held_together(pair, order).findings
        assert told, pair
        assert len(told) == 1 or not told[0].condition.opposes(told[1].condition), [each.name for each in told]
        shown = [each.name for cause in told for each in (cause, *cause.follows)]
        assert {each.name for each in pair if each.wrong} <= set(shown)  # none is lost
        assert len(shown) == len(set(shown))


def test_all_conditions_at_once_have_cures_that_agree():
    for seed in range(50):
        order = np.random.default_rng(seed).permutation(len(CONDITIONS))
        told = held_together(CONDITIONS, order).findings
        assert not any(a.condition.opposes(b.condition) for a, b in itertools.combinations(told, 2))
        shown = [each.name for cause in told for each in (cause, *cause.follows)]
        assert {each.name for each in CONDITIONS if each.wrong} <= set(shown)
        assert len(shown) == len(set(shown))


def too_high(every=1):
    """The rate is too high from step 60 on: the gradient first, then KL, entropy and the reward, then all else."""
    rows = rows_of_run(
        300,
        (60, {"grad_norm": 10.0, "kl": lambda n: 0.05 + n / 100, "entropy": 0.5}),
        (75, {"reward": falling(60), "completions/clipped_ratio": 0.6, "completions/mean_length": 250.0}),
        (140, {"reward_std": 0.05, "frac_reward_zero_std": 0.9}),
    )
    keys = [key for key in rows[0] if key != "step"]
    return [
        {"step": part[-1]["step"]} | {key: float(np.mean([row[key] for row in part])) for key in keys}
        for part in (rows[start : start + every] for start in range(0, len(rows), every))
    ]


@pytest.mark.parametrize("every", [1, 5])
def test_a_rate_that_is_too_high_is_one_cause_with_all_that_it_does_beneath(every):
    found = diagnose(too_high(every))
    (finding,) = found.findings
    assert finding.name == "reward fell"
    assert {"gradient grows", "KL runs away", "truncation", "silent groups"} <= {each.name for each in finding.follows}
    assert not found.notes
    assert str(found).count("What to do:") == 1
    assert "raise" not in str(found).lower()
    assert min(each.found for each in finding.follows) < finding.found  # the gradient was seen before the fall


def test_what_was_wrong_long_before_has_a_cure_of_its_own():
    """Silent prompts from the start; the fall comes much later."""
    rows = rows_of_run(300, (230, {"reward": falling(30)}), frac_reward_zero_std=0.9)
    assert list(names(rows)) == ["reward fell", "silent groups"]


def test_a_sampler_mismatch_is_the_cause_of_a_fall_after_it_and_comes_with_one_before_it():
    apart, key = 0.4, "sampling/sampling_logp_difference/mean"
    rows = rows_of_run(160, (30, {key: apart}), (100, {"reward": falling(20)}), **{key: 0.01})
    assert names(rows) == {"sampler mismatch": ["reward fell", "no progress"]} or names(rows) == {
        "sampler mismatch": ["reward fell"]
    }
    rows = rows_of_run(160, (30, {"reward": falling(20)}), (100, {key: apart}), **{key: 0.01})
    assert list(names(rows)) == ["reward fell"]
    assert "sampler mismatch" in names(rows)["reward fell"]


def test_an_outlying_reward_explains_the_gradient_of_its_step_and_not_one_much_later():
    rows = rows_of_run(160)
    rows[79] |= {"reward": 1e4, "reward_std": 1e5, "grad_norm": 1e4}
    assert names(rows) == {"outlying reward": ["gradient spikes"], "no progress": []}  # which is so without it, too
    rows[139] |= {"grad_norm": 1e4}
    found = names(rows)
    assert list(found) == ["outlying reward", "gradient spikes"]


def test_one_step_that_is_not_finite_does_not_explain_a_fall_long_after_it():
    rows = rows_of_run(160, (120, {"reward": falling(20)}))
    rows[19]["loss"] = float("nan")
    assert list(names(rows)) == ["not finite", "reward fell"]
    broken = rows_of_run(
        160, (30, {"loss": float("nan")}), (35, {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0})
    )
    assert names(broken) == {"not finite": ["same reward"]}


@pytest.mark.parametrize(("before", "then"), [(1.2, 4.0), (1.2, 0.1)])
def test_a_policy_that_collapses_at_once_is_no_broken_reward(before, then):
    """All rewards are 0 from step 31 on, of completions that have become others; and of some that have not."""
    nothing = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "entropy": then}
    found = diagnose(rows_of_run(80, (31, nothing), entropy=before))
    assert [finding.name for finding in found.findings] == ["policy collapsed"]
    assert found.findings[0].follows[0].name == "same reward"
    assert "since step 31 every completion gets reward 0, and entropy is" in found.findings[0].sentence
    assert names(rows_of_run(80, (31, nothing), entropy=then)) == {"same reward": []}


def test_a_gradient_that_is_cut_off_is_not_laid_to_rewards_that_agree():
    """By three rows that deny it, or by all rows of a shorter log."""
    cut = {"grad_norm": 0.0, "loss": -0.0, "frac_reward_zero_std": 0.0}
    for rows in (rows_of_run(60, (41, cut)), rows_of_run(1, (1, cut)), rows_of_run(2, (1, cut))):
        (finding,) = diagnose(rows).findings
        assert finding.name == "gradient cut off"
        assert "The reward is not the cause" in finding.cure
    assert "For 1 step there was no gradient" in diagnose(rows_of_run(1, (1, cut))).findings[0].sentence
    old = [
        {key: value for key, value in row.items() if key != "frac_reward_zero_std"} for row in rows_of_run(9, (1, cut))
    ]
    assert names(old) == {"gradient cut off": []}
    agree = rows_of_run(9, (1, cut | {"frac_reward_zero_std": 1.0}))  # TRL's reward_std is that of all completions
    assert names(agree) == {"no gradient": []}


def test_a_first_row_or_two_without_a_gradient_and_a_loss_of_0_are_healthy():
    rows = rows_of_run(
        40, (1, {"grad_norm": 0.0, "learning_rate": 0.0}), (3, {"grad_norm": 0.5, "learning_rate": 1e-4})
    )
    assert names(rows) == {}
    assert names(rows_of_run(40, loss=0.0)) == {}


def test_a_loss_of_0_is_explained_where_a_gradient_is_there():
    def notes(**values):
        return [note.name for note in diagnose(rows_of_run(40, **values)).notes]

    said = str(diagnose(rows_of_run(40, loss=0.0)))
    assert "The loss is 0 in every step, though there is a gradient: it does not measure progress." in said
    assert notes(loss=-0.0) == ["loss of zero"]
    assert notes(loss=0.01) == notes(loss=1e-4) == notes(loss=0.0, grad_norm=0.0) == []
    rows = [{key: row[key] for key in ("loss", "reward", "reward_std")} for row in rows_of_run(5, loss=0.0)]
    assert diagnose(rows).notes == []  # whether there is a gradient is not known
    assert diagnose(rows_of_run(40, (20, {"loss": 1e-4}), loss=0.0)).notes == []


def test_a_metric_that_is_nan_in_every_row_is_named():
    rows = rows_of_run(8, kl=float("nan"))
    found = diagnose(rows)
    assert (found.findings, found.empty) == ([], {"kl": 8})
    assert "Notes, not problems:\n-  kl is NaN or infinite in all 8 rows.\n" in str(found)
    assert found.plain()["never_finite"] == {"kl": 8}
    assert not diagnose([*rows, WELL | {"step": 9}]).empty  # once it is a number


def test_a_metric_that_is_nan_is_not_lacking(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("{'loss': nan, 'grad_norm': nan, 'kl': nan, 'reward': -1.0, 'step': 7}\n")
    said = str(diagnose(log))
    assert "NaN or infinite in step 7: loss, grad_norm, kl." in said
    lacking = said.partition("The log lacks ")[2]
    assert "entropy" in lacking
    assert not re.search(r"\bloss|grad_norm|kl,", lacking.replace("step_kl", ""))


@pytest.mark.parametrize("share", [1.0, 0.97])
def test_completions_that_are_all_cut_and_earn_nothing(share):
    """Told as that, with what follows beneath; whether all earn the same or a few something."""
    nothing = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
    rows = rows_of_run(120, (1, nothing), **{"completions/clipped_ratio": share})
    assert names(rows) == {"all truncated": ["same reward"]}
    assert names([{"step": 0, "eval/accuracy": 0.0}, *rows]) == {"all truncated": ["same reward"]}
    few = rows_of_run(
        120, reward=0.05, reward_std=0.01, frac_reward_zero_std=0.9, **{"completions/clipped_ratio": share}
    )
    (finding,) = diagnose([row | {"reward": abs(row["reward"] - 0.04)} for row in few]).findings
    assert finding.name == "all truncated"
    assert (finding.since, finding.found) == (1, 20)  # as much as policies earn that learn from here
    assert "raise max_completion_length" in finding.cure
    fewer = [row | {"reward": 0.004 + row["step"] % 2 / 1000} for row in few]
    assert [each.found for each in diagnose(fewer).findings] == [5]


@pytest.mark.parametrize("rise", [1.0, 3e-2, 2e-3])
def test_completions_that_are_all_cut_and_earn_more_and_more(rise):
    """A policy built from scratch ends no answer: it earns little at first, and what it learns shows soon or late."""
    for seed in range(10):
        random, cut = np.random.default_rng(seed), {"completions/clipped_ratio": 0.98, "grad_norm": 1.0}
        level = [min(0.95, 0.012 * (1 + n / 5) + rise * max(0, n - 6) / 20) for n in range(60)]
        rows = [cut | {"step": n + 1, "reward": random.binomial(256, p) / 256} for n, p in enumerate(level)]
        watch = Watch()
        assert not [each.name for row in rows for each in watch.observe(row) if each.wrong], seed


def test_a_limit_that_is_meant_is_not_told():
    """Answers of a fixed length: the reward is high, rises from the bottom, or is at least something."""
    cut = {"completions/clipped_ratio": 1.0}
    assert names(rows_of_run(120, reward=0.95, reward_std=0.1, **cut)) == {}
    assert names(rows_of_run(120, (1, {"reward": lambda n: 0.15 + n / 200}), **cut)) == {}
    assert "all truncated" not in names(rows_of_run(120, reward=0.4, **cut))
    late = rows_of_run(120, (40, {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0} | cut))
    assert "all truncated" not in names(late)


def test_a_kl_that_is_nan_beside_a_loss_that_is_not_is_no_overflow():
    """TRL's, where every completion of a step is cut and masked."""
    rows = rows_of_run(30, (7, {"kl": float("nan")}), (9, {"kl": 0.01}), (20, {"entropy": float("nan")}))
    assert names(rows) == {}
    assert names([row | {"grad_norm": float("nan")} if row["step"] == 7 else row for row in rows]) == {"not finite": []}
    assert names([{"step": 3, "reward": 0.1, "kl": float("nan")}]) == {"not finite": []}  # nothing denies it


def test_missing_rewards_are_told_with_their_steps():
    """TRL leaves out what has no reward: steps 5 to 9 of 12."""
    missing = {"completions/masked_ratio": 1.0, "grad_norm": 0.0, "loss": 0.0}
    rows = rows_of_run(12, **{"completions/masked_ratio": 0.0})
    rows = [{"step": row["step"]} | missing if 5 <= row["step"] <= 9 else row for row in rows]
    found = diagnose(rows)
    (finding,) = found.findings
    assert (finding.name, finding.since, finding.found, finding.until, found.steps) == ("rewards missing", 5, 5, 9, 12)
    half = rows_of_run(30, (15, {"completions/masked_ratio": 0.5}), (22, {"completions/masked_ratio": 0.0}))
    (finding,) = diagnose([{"completions/masked_ratio": 0.0} | row for row in half]).findings
    assert (finding.since, finding.until) == (15, 21)


def test_a_reward_that_is_always_earned_says_nothing_of_an_accuracy_that_is_low():
    """There is no rise to go by; a task that is learned has the accuracy, too."""
    for accuracy, told in ((0.35, ["reward without accuracy"]), (0.9, [])):
        rows = rows_of_run(120, reward=0.96, reward_std=0.05)
        random = np.random.default_rng(1)
        rows = [row | {"reward": min(1.0, row["reward"])} for row in rows]
        rows = [
            row | {"eval/accuracy": accuracy + random.normal(0, 0.04)} if row["step"] % 10 == 0 else row for row in rows
        ]
        assert list(names(rows)) == told


@pytest.mark.parametrize(("earned", "beneath"), [(1.0, True), (0.0, False)])
def test_a_hacked_reward_explains_an_outage_in_which_all_is_earned_and_none_in_which_nothing_is(earned, beneath):
    hacked = {"reward": 0.93, "reward_std": 0.05}
    same = {"reward": earned, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
    rows = rows_of_run(200, (40, hacked), (150, same))
    rows = [row | ({"eval/accuracy": 0.3} if row["step"] % 10 == 0 else {}) for row in rows]
    found = names(rows)
    assert ("same reward" in found["reward without accuracy"]) == beneath
    assert ("same reward" in found) != beneath


@pytest.mark.parametrize(("entropy", "told"), [(0.4, "entropy collapsed"), (1.1, "silent groups")])
def test_prompts_that_fall_silent_with_the_entropy_are_not_too_hard(entropy, told):
    change = {"entropy": entropy, "frac_reward_zero_std": 0.85}
    found = names(rows_of_run(160, (50, change), reward=0.3, frac_reward_zero_std=0.4))
    assert next(iter(found)) == told
    assert ("silent groups" in found) == (told == "silent groups")
    tens = rows_of_run(15, (4, change), reward=0.3, frac_reward_zero_std=0.6)  # a first row of ten steps
    tens = [row | ({"frac_reward_zero_std": 0.8} if row["step"] in (2, 3) else {}) for row in tens]
    assert next(iter(names([row | {"step": 10 * row["step"]} for row in tens]))) == told


def test_a_fall_beneath_another_cause_stops_a_run_that_asks_for_it():
    key = "sampling/sampling_logp_difference/mean"
    rows = rows_of_run(140, (30, {key: 0.4}), (100, {"reward": falling(20)}), **{key: 0.01})
    monitors = Monitors(stop_on_collapse=True)
    stops = [(monitors.observe(row), monitors.stop)[1] for row in rows]
    assert not any(stops[:100])
    stop = next(each for each in stops if each)
    assert stop.startswith("sampler mismatch: ")
    assert "reward fell: The reward has fallen" in stop
    assert "Bring the two closer" in stop  # the cure of its cause


def test_a_limit_that_is_meant_is_not_told_while_the_reward_is_low_and_most_prompts_agree():
    """At no row of the first ten, of rewards between 0 and 1 or not; a first success later takes the finding back."""
    cut = {"completions/clipped_ratio": 1.0}
    for low in (0.0, -1.0):
        rows = rows_of_run(12, reward=low + 0.24, reward_std=0.1, frac_reward_zero_std=0.8, **cut)
        watch = Watch()
        assert not [each for row in rows for each in watch.observe(row) if each.name == "all truncated"]
    late = {"reward": lambda n: 0.05 + n / 200}
    rows = rows_of_run(140, (20, late), reward=0.04, reward_std=0.1, frac_reward_zero_std=0.6, **cut)
    rows = [row | {"reward": max(0.0, row["reward"])} for row in rows]
    assert "all truncated" in names(rows[:21])
    assert names(rows) == {}
    made = {"learning_rate": 1e-3, "lr_factor": 1.0, "step_time": 1.0, "n_snr": 0.1, "snr_low": 0.0}
    said = summary([row | made for row in rows], "runs/x", Facts(prompts=4))
    assert "learning rate     1.0e-03, mean of the last 20 updates\n" in said
    assert "critical batch" not in said  # nobody knows it
    assert re.search(r"^all truncated: reported after step 2\d, not seen since step [2-9]\d$", said, re.MULTILINE)


def test_silent_prompts_are_easy_or_hard_only_where_it_is_known_what_they_pay():
    for low, words in ((0.0, "these prompts are too hard ("), (3.0, "these prompts are too easy or too hard (")):
        found = diagnose(rows_of_run(120, reward=low + 0.3, frac_reward_zero_std=0.85)).findings
        silent = next(each for each in found if each.name == "silent groups")
        assert words in silent.sentence


def test_prompts_of_which_some_differ_are_not_said_to_agree():
    """Of means of ten steps and the norm of the last of these."""
    rows = [
        {"step": 10 * n, "reward": 0.5, "reward_std": 0.4, "frac_reward_zero_std": 0.81, "grad_norm": 0.0}
        for n in range(1, 6)
    ]
    (finding,) = diagnose(rows).findings
    assert finding.sentence == (
        "For 50 steps there was no gradient: all completions of 81% of the prompts got the same reward."
    )


def test_one_outlier_among_rewards_is_not_what_they_once_spread_by():
    """Half a run later, when nothing is laid to the outlier any more."""
    rows = rows_of_run(160, frac_reward_zero_std=None)
    rows[30] |= {"reward": 1e4, "reward_std": 1e5}
    assert names(rows) == {"outlying reward": [], "no progress": []}


@pytest.mark.parametrize("seen", ["reward_max", "reward_std", "reward"])
def test_a_task_that_is_solved_after_an_outlier_is_solved(seen):
    """By whatever of the step shows it: what all earn is the most that a completion earned but for that one."""
    rows = [{"step": n, "reward": 0.3 + n / 50, "reward_std": 0.2 - n / 180} for n in range(1, 36)]
    rows = [row | {"reward_min": 0.0, "reward_max": 1.0, "reward_iqr": 0.2} if seen == "reward_max" else row
            for row in rows]  # fmt: skip
    rows[19] |= {"reward": 400.0, "reward_std": 800.0} | ({"reward_max": 5e4} if seen == "reward_max" else {})
    same = {"reward": 1.0, "reward_std": 0.0, "reward_min": 1.0, "reward_max": 1.0, "reward_iqr": 0.0}
    rows += [{key: same.get(key, n) for key in rows[0]} for n in range(36, 56)]
    rows = [{key: value for key, value in row.items() if seen != "reward" or key != "reward_std"} for row in rows]
    found = diagnose(rows)
    assert [finding.name for finding in found.findings] == ["outlying reward"]
    assert "solved" in {note.name for note in found.notes}


def test_steps_that_stay_short_follow_from_an_outlier_just_before_them_and_from_no_other():
    def stuck(since):
        rising = {"reward": lambda late: 0.5 + late / 300, "step_kl": 0.1, "step_kl_target": 0.1}
        return rows_of_run(80, (0, rising), (since, {"step_kl": 1e-6}))

    for since, named in (
        (31, {"outlying reward": ["steps too short"]}),
        (51, {"outlying reward": [], "steps too short": []}),
    ):
        rows = stuck(since)
        rows[29] |= {"reward_std": 40.0}
        assert names(rows) == named
    assert names(stuck(31)) == {"steps too short": []}


@pytest.mark.parametrize("every", [1, 10])
def test_a_reward_that_never_changes_is_told_after_80_steps(every):
    parts = {"rewards/format/mean": 0.98, "rewards/task/mean": 0.0}
    rows = rows_of_run(150 // every, reward=0.98, reward_std=0.1, **parts)  # as many steps
    for row in rows:
        row["step"] *= every
    (finding,) = diagnose(rows).findings
    assert (finding.name, finding.found) == ("format saturated", 80 if every == 1 else 90)


def test_a_reward_that_rises_slowly_beside_the_format_is_not_told():
    random = np.random.default_rng(3)
    rows = [
        row | {"rewards/format/mean": 0.98, "rewards/task/mean": 0.1 + row["step"] / 1500 + random.normal(0, 0.02)}
        for row in rows_of_run(150, reward=1.1, reward_std=0.4)
    ]
    assert "format saturated" not in names(rows)


def test_four_evaluations_that_are_level_by_luck_are_no_reward_without_accuracy():
    rows = rows_of_run(55, (1, {"reward": lambda n: 0.3 + n / 200}))
    level = {10: 0.393, 20: 0.402, 30: 0.402, 40: 0.391, 50: 0.48}
    rows = [row | ({"eval/accuracy": level[row["step"]]} if row["step"] in level else {}) for row in rows]
    assert names(rows) == {}
    fallen = {10: 0.4, 20: 0.3, 30: 0.2, 40: 0.1, 50: 0.0}
    rows = [row | ({"eval/accuracy": fallen[row["step"]]} if row["step"] in fallen else {}) for row in rows]
    assert names(rows) == {"reward without accuracy": []}


ILL_IN_ROWS = {
    "reward fell": (41, {"reward": 0.1}),
    "rate collapsed": (41, {"learning_rate": 1e-9}),
    "updates lost": (1, {"step_kl": 0.0}),
    "same reward": (31, {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}),
    "no gradient": (31, {"frac_reward_zero_std": 1.0, "grad_norm": 0.0}),
    "rewards missing": (41, {"completions/masked_ratio": 0.5}),
    "silent groups": (1, {"frac_reward_zero_std": 0.9}),
    "KL runs away": (41, {"kl": 2.0}),
}


@pytest.mark.parametrize("name", ILL_IN_ROWS)
def test_a_log_without_steps_is_reported_in_rows(name):
    rows = [{key: each for key, each in row.items() if key != "step"} for row in rows_of_run(90, ILL_IN_ROWS[name])]
    said = str(diagnose(rows)).partition("Not checked")[0]
    assert f". {name}, since row " in said
    cures = {each.cure for each in diagnose(rows).findings}
    for cure in cures:
        said = said.replace(cure, "")
    assert "step" not in said


def test_two_rows_of_ten_steps_are_too_few_to_say_that_nothing_is_wrong():
    rows = [{"step": 10 * n, "reward": 0.3 + n / 10} for n in range(1, 7)]
    assert "No problem found so far, in fewer than 60 steps." in str(diagnose(rows[:2]))
    assert "No problem found." in str(diagnose(rows))


def test_no_progress_takes_the_place_of_no_progress_yet():
    for count, told in ((99, ([], ["no progress yet"])), (103, (["no progress"], []))):
        found = diagnose(rows_of_run(count))
        assert ([each.name for each in found.findings], [each.name for each in found.notes]) == told


DOWN = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
CUT, LENGTH, SAMPLED = "completions/clipped_ratio", "completions/mean_length", "sampling/sampling_logp_difference/mean"
NAN = float("nan")
GARBAGE = {CUT: 1.0, LENGTH: 1024.0, "entropy": 6.0}
CAUSES = {
    # changes of a run whose completions are all cut and earn 0.21, and the cause that is to be named
    "the grader dies": ([(30, DOWN)], {}, "same reward"),
    "the grader dies soon": ([(4, DOWN)], {}, "same reward"),
    "it pays -1": ([(30, DOWN | {"reward": -1.0})], {}, "same reward"),
    "for a while": ([(30, DOWN), (50, {key: WELL[key] for key in DOWN} | {"reward": 0.21})], {}, "same reward"),
    "hardly all are cut": ([(30, DOWN)], {CUT: 0.95}, "same reward"),
    "nearly solved before": ([(30, DOWN)], {"reward": 0.8}, "same reward"),
    "lengths are logged late": ([(30, DOWN | {CUT: 1.0})], {CUT: None}, "same reward"),
    "empty text": ([(30, DOWN | {LENGTH: 0.0, CUT: 0.0, "entropy": 0.0})], {CUT: 0.05}, "same reward"),
    "a collapse": ([(30, DOWN | GARBAGE)], {CUT: 0.05}, "policy collapsed"),
    "a collapse of text that is cut": ([(30, DOWN | {"entropy": 6.0})], {}, "policy collapsed"),
    "a slow one": (
        [(30, {"reward": lambda n: max(0.003, 0.4 - n / 50), "reward_std": 0.01})],
        {"reward": 0.4},
        "reward fell",
    ),
    "another sampler": ([(30, {SAMPLED: 0.8}), (36, DOWN | {CUT: 1.0})], {SAMPLED: 0.01}, "sampler mismatch"),
    "at once": ([(30, DOWN | {SAMPLED: 0.8})], {SAMPLED: 0.01}, "sampler mismatch"),
    "NaN weights": ([(30, DOWN | GARBAGE | {"loss": NAN, "grad_norm": NAN})], {CUT: 0.05}, "not finite"),
    "NaN weights, all cut": ([(30, DOWN | {"loss": NAN, "grad_norm": NAN, "kl": NAN})], {}, "not finite"),
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("name", CAUSES)
def test_what_earned_something_a_step_before_is_not_all_truncated(name, every):
    changes, values, cause = CAUSES[name]
    values = {"reward": 0.21, CUT: 1.0, LENGTH: 256.0} | values
    rows = rows_of_run(90, *changes, **values)
    rows = [
        {key: value for key, value in row.items() if value is not None} | {"step": every * row["step"]} for row in rows
    ]
    found = diagnose([row | {"reward": max(-1.0, row["reward"])} for row in rows]).findings
    assert found[0].name == cause
    assert "all truncated" not in {each.name for finding in found for each in (finding, *finding.follows)}


def test_prompts_that_were_solved_before_are_not_too_hard():
    rows = rows_of_run(200, (60, {"reward": 0.03, "frac_reward_zero_std": 0.95}), reward=0.6)
    found = diagnose(rows).findings[0]
    silent = next(each for each in found.follows if each.name == "silent groups")
    assert "too easy or too hard" in silent.sentence


def test_groups_of_one_completion():
    """As verl logs them: means over tokens and over completions differ a little."""
    random = np.random.default_rng(0)
    rows = [{"critic/score/mean": score, "critic/advantages/mean": score * random.normal(1, 0.05), "actor/entropy": 0.1}
            for score in random.normal(-0.4, 0.25, 40)]  # fmt: skip
    (finding,) = diagnose(rows).findings
    assert (finding.name, finding.since, finding.found) == ("groups of one", 1, 3)
    assert "rollout.n" in finding.cure
    assert [each.name for each in diagnose(rows[:1]).findings] == ["groups of one"]  # all of a shorter log
    grouped = [row | {"critic/advantages/mean": random.normal(0, 0.02)} for row in rows]
    assert not diagnose(grouped).findings
    assert not diagnose([row | {"critic/score/mean": 0.0, "critic/advantages/mean": 0.0} for row in rows[:4]]).findings


def test_one_answer_to_all_prompts():
    """In two steps of three, in a log without the share of silent ones; not of fixed lengths, nor where all is won."""

    def found(earned=0.64, length=9.0, others=60.0):
        random, rows = np.random.default_rng(0), []
        for step in range(1, 46):
            row = {"step": step, "reward": random.uniform(0.4, 0.6), "reward_std": 0.2, "kl": 0.03}
            row |= {"completion_length": others + random.normal(0, 20) * (others != length), "grad_norm": 0.4}
            same = {"reward": earned, "reward_std": 0.0, "completion_length": length, "grad_norm": 0.003}
            rows.append(row | (same if step > 5 and step % 3 else {}))
        return [finding.name for finding in diagnose(rows).findings]

    assert found() == ["one answer"]
    assert "one answer" not in found(others=9.0)
    assert "one answer" not in found(earned=1.0)


@pytest.mark.parametrize(
    ("first", "told"),
    [({"kl": 10833.0, "grad_norm": 421403.0}, True), ({"kl": 10833.0}, True), ({"grad_norm": 421403.0}, True),
     ({"kl": 6.8, "grad_norm": 50.0}, False)],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 30])
def test_the_first_row_counts_too(first, told, count):
    """The KL of PPO, which is summed over an answer, may be 6.8 from the start."""
    rows = rows_of_run(count)
    rows[0] |= first
    found = {finding.name: finding for finding in diagnose(rows).findings}
    assert ("far at once" in found) == told
    if told:
        assert found["far at once"].since == 1
        assert all(f"{value:,.0f}" in found["far at once"].sentence for value in first.values())
