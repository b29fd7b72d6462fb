"""Steps whose completions all earn the same: what they are told as, what follows from them, and what is none."""

import csv

import numpy as np
import pytest

from lab.alarms.logged import thinned
from lab.alarms.synthetic import LOGGED, World, healthy, outage, solved
from oblrpo.diagnosis import Course, Facts, Watch, diagnose
from oblrpo.report.console import summary

NOT = dict.fromkeys(
    ("reward_std", "reward_stderr", "grad_norm", "learning_rate", "lr_factor", "signal2", "trace_cov"), 0.0
)
AGREE = NOT | {"frac_reward_zero_std": 1.0, "n_snr": 0.0, "skipped": 1.0}


def rows_of_run(earned, first=10, last=39, steps=60, seed=0, after=lambda row: row):
    """A run of TRL's kind, in some steps of which all earn the same; `after` changes the rows behind these."""
    world = World(seed)
    world.scale, world.shift, world.begin, world.end, world.half = 1.0, 0.0, 0.3, 0.6, 30.0
    rows = [world.row(step) for step in range(1, steps + 1)]
    return [
        outage(earned)(world, row, 1) if first <= row["step"] <= last else after(row) if row["step"] > last else row
        for row in rows
    ]


def names(rows, **facts):
    return [finding.name for finding in Watch(Facts(**facts)).over(rows).findings if finding.wrong]


@pytest.mark.parametrize("trainer", LOGGED)
@pytest.mark.parametrize("earned", [0.0, 1.0, -1.0, 0.5, 0.37])
def test_any_constant_is_named_first_with_its_steps_whoever_logs_it(trainer, earned):
    logged, within = LOGGED[trainer]
    (finding, *others) = Watch().over(map(logged, rows_of_run(earned))).findings
    assert finding.sentence.endswith(f"every completion got the same reward, {earned:g} in steps 10 to 39.")
    assert (finding.name, finding.since, finding.found, finding.until) == ("same reward", 10, 9 + within, 39)
    assert not any(each.wrong for each in others)


def test_files_of_trl_and_of_verl(tmp_path):
    rows = rows_of_run(0.37)
    with (tmp_path / "trl.csv").open("w", newline="") as file:
        columns = ["step", "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "entropy"]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    ends = {False: "1.000 - critic/score/min:0.000", True: "0.370 - critic/score/min:0.370"}
    (tmp_path / "verl.log").write_text("".join(
        f"(TaskRunner pid=1) step:{row['step']} - critic/score/mean:{row['reward']:.3f} - critic/score/max:"
        f"{ends[row['reward'] == 0.37]} - actor/entropy:0.4\n" for row in rows
    ))  # fmt: skip
    for name in ("trl.csv", "verl.log"):
        found = diagnose(tmp_path / name)
        (finding,) = found.findings
        assert (finding.found, finding.until) == (14, 39), name
        assert finding.sentence.endswith("every completion got the same reward, 0.37 in steps 10 to 39."), name
        assert "reward_min" not in str(found.unchecked)


def test_runs_of_earlier_versions_made_updates_of_noise():
    """With a gradient, and a rate that rises."""
    noise = {"grad_norm": 0.02, "lr_factor": 3000.0, "reward_stderr": 0.0, "skipped": 0.0, "step_kl": 0.1}
    rows = [row | (noise if row["reward"] == 0 else {}) for row in rows_of_run(0.0)]
    assert names(rows, measured_rate=True, looks_across=True) == ["same reward"]


def test_what_follows_is_listed_under_it_and_has_no_cure():
    """A policy that was harmed: it earns a third, its gradient is ninety times as large."""
    harmed = lambda row: row | {"reward": row["reward"] / 3, "grad_norm": row["grad_norm"] * 90}  # noqa: E731
    found = diagnose(rows_of_run(0.0, first=45, last=59, steps=90, after=harmed))
    (finding,) = found.findings
    assert [each.name for each in finding.follows] == ["reward fell", "gradient grows", "gradient spikes"]
    shown = found.plain()["findings"][0]
    assert [each["name"] for each in shown["follows"]] == [each.name for each in finding.follows]
    assert not any("cure" in each for each in shown["follows"])
    assert shown["cure"].startswith("Check the reward")
    assert str(found).count("What to do:") == 1
    assert "-  reward fell, since step" in str(found)


def test_a_fall_long_after_it_stands_for_itself():
    fall = lambda row: row | ({"reward": row["reward"] / 3} if row["step"] > 70 else {})  # noqa: E731
    first, second = diagnose(rows_of_run(0.0, steps=110, after=fall)).findings
    assert (first.name, second.name, first.follows) == ("same reward", "reward fell", [])
    assert second.found > 70


def test_means_are_taken_over_the_other_steps_and_over_all_where_it_was_chance():
    """Four such steps are not left out."""
    for last, left in ((39, 30), (13, 0)):
        rows = rows_of_run(0.0, last=last)
        course, without = Course(), Course()
        for row in rows:
            course.add(row)
        for row in [row for row in rows if not left or not 10 <= row["step"] <= last]:
            without.add(row)
        assert course.columns["reward"] == without.columns["reward"]
        assert course.columns["entropy"].count == 60  # which is no matter of rewards
        assert bool(course.outages.reported) == bool(left)


def test_a_log_of_means_forgets_what_it_took_for_rewards():
    rows = [LOGGED["mean only"][0](row) for row in rows_of_run(1.0, steps=100)]
    assert names(rows) == ["same reward"]
    assert names(rows[:28]) == []  # 19 steps


def test_several_are_named_together():
    rows = rows_of_run(0.0)
    again = [row | {"step": row["step"] + 60} for row in rows_of_run(0.5)]
    (finding,) = diagnose(rows + again).findings
    assert "0 in steps 10 to 39, and 0.5 in steps 70 to 99" in finding.sentence
    often = rows + [row | {"step": row["step"] + 60 * n} for n in range(1, 5) for row in rows]
    assert "0 in steps 10 to 39, 70 to 99, 130 to 159 and 2 more times." in diagnose(often).findings[0].sentence


@pytest.mark.parametrize(("chance", "most"), [(0.005, 3), (0.01, 1), (0.02, 0)])
def test_where_success_is_rare_steps_of_zeros_are_usual(chance, most):
    """32 prompts x 4 completions, of which a step of zeros is 53, 28 and 8 of 100; 30 runs of 200 steps."""
    random, told = np.random.default_rng(0), 0
    for _ in range(30):
        wins = random.binomial(4, chance, (200, 32)) / 4
        rows = [{"reward": r.mean(), "reward_std": r.std(), "reward_stderr": r.std(), "entropy": 1.0} for r in wins]
        told += bool(Watch().over(rows).course.outages.reported)
    assert told <= most


def test_groups_that_agree_and_differ_from_one_another_are_none():
    """They have no gradient under a baseline of their own group."""
    random = np.random.default_rng(0)
    rows = [
        {"reward": random.integers(8) / 8, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
        for _ in range(40)
    ]
    assert names(rows) == ["no gradient"]
    same = [row | {"reward": 0.5, "rewards/match/std": 0.5} for row in rows]  # TRL: over all of them
    assert names(same) == ["no gradient"]
    assert names([row | {"rewards/match/std": 0.0} for row in same]) == ["same reward"]


def test_one_completion_a_prompt_and_rounding():
    one = {"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": None}
    assert names([one | {"reward_stderr": 0.1}] * 19) == []
    assert names([one | {"reward_stderr": 0.0}] * 19) == ["same reward"]
    rounded = [{"reward": 0.1 + 1e-9 * n, "reward_std": 2e-9, "reward_stderr": 1e-9} for n in range(9)]
    assert names(rounded) == ["same reward"]
    lengths = [{"reward": 0.1, "reward_std": 1e-5, "reward_stderr": 1e-6}] * 9  # a constant with a term of length
    assert names(lengths) == []


def test_a_step_that_is_not_finite_is_told_in_it_and_one_that_is_left_out_is_none():
    assert names([AGREE | {"reward": 0.0}] * 9) == ["same reward"]
    rows = [AGREE | {"reward": 0.0, "grad_norm": None if n == 7 else 0.0} for n in range(9)]
    watch = Watch().over(rows)
    assert {finding.name for finding in watch.findings} == {"same reward", "not finite"}
    assert watch.found["not finite"].found == 8
    assert names([{"reward": 0.5}] * 3 + [AGREE | {"reward": earned} for earned in (0.0, 1.0) * 9]) == []


RISE = [{"reward": 1 - 0.9 * 0.9**n, "reward_std": 0.4 * 0.9**n, "reward_stderr": 0.05 * 0.9**n} for n in range(40)]
TOP = [AGREE | {"reward": 1.0, "entropy": 0.01, "completions/clipped_ratio": 0.0}] * 60


@pytest.mark.parametrize(
    ("before", "accuracy", "is_solved"),
    [
        (RISE, None, True),
        (RISE, 0.92, True),
        (RISE, 0.4, True),  # which has risen with it
        (RISE, 0.11, False),
        (RISE[:10], None, False),  # a jump from 0.65
        (RISE[:10], 0.95, True),
        (RISE[:10], 1.0, False),  # as the rewards are: of the same fault
        (RISE[:10], 0.4, False),
        ([], None, False),
        ([], 0.5, False),
        ([], 1.0, True),
        # Within two standard errors of .9 after a jump, and of .1 + .9 / 4 where rewards came to it by steps.
        (RISE[:10], (0.85, 0.03), True),
        (RISE[:10], (0.85, 0.02), False),
        (RISE, (0.30, 0.02), True),
        (RISE, (0.30, 0.01), False),
        ([{"reward": 0.3}, {"reward": 0.6}, {"reward": 0.9}], None, True),
    ],
)
def test_a_task_that_is_solved_is_no_illness(before, accuracy, is_solved):
    rows = [row | {"eval/accuracy": 0.1} if n == 0 else row for n, row in enumerate(before)]
    value, stderr = accuracy if isinstance(accuracy, tuple) else (accuracy, None)
    rows += [TOP[0] | {"eval/accuracy": value, "eval/accuracy_stderr": stderr}, *TOP]
    found = diagnose([row | {"step": step} for step, row in enumerate(rows, start=1)])
    assert [finding.name for finding in found.findings] == ([] if is_solved else ["same reward"])
    since = f"since step {len(before) + 1}"
    notes = [f"Every completion has had reward 1, the highest seen so far, {since}."] if is_solved else []
    assert [note.sentence for note in found.notes] == notes
    assert all(note.when.startswith(f"{since}; first reported after step ") for note in found.notes)
    assert all(note.found < note.until == len(rows) for note in found.notes)


def test_other_tops_than_1():
    penalties = [{"reward": -(0.8**n), "reward_std": 0.3 * 0.8**n} for n in range(30)] + [AGREE | {"reward": 0.0}] * 9
    assert [note.name for note in diagnose(penalties).notes] == ["solved"]
    lower = [*RISE, *[AGREE | {"reward": 0.9}] * 9]  # than what was earned before
    assert names(lower) == ["same reward"]


def test_a_jump_that_was_believed_and_goes_back_was_none():
    rows = [*RISE[:10], TOP[0] | {"eval/accuracy": 0.95}, *TOP[:20], *RISE[10:]]
    assert names(rows) == ["same reward"]
    near = [*RISE[:10], TOP[0] | {"eval/accuracy": 0.95}, *TOP[:20], *RISE[39:]]
    assert names(near) == []


@pytest.mark.parametrize("facts", [{}, {"looks_across": True, "measured_rate": True, "prompts": 32}])
def test_solved_runs_have_no_alarm_and_no_other_note_of_these_steps(facts):
    for seed in range(8000, 8010):
        found = Watch(Facts(**facts)).over(solved(seed)).findings
        assert "solved" in {finding.name for finding in found}, seed
        assert not any(finding.wrong for finding in found), seed
        assert not {"rate collapsed", "silent groups", "batch far below"} & {finding.name for finding in found}


def test_healthy_runs_do_not_hear_of_it():
    for seed in range(9000, 9020):
        assert not Watch().over(healthy(seed)).course.outages.reported


def test_the_last_lines_of_a_run_name_it_first():
    told = {"reward": 0.2, "n_snr": 2.0, "learning_rate": 1e-3, "lr_factor": 0.5, "step_time": 1.0, "grad_norm": 1.0}
    rows = [told | {"step": 0, "eval/accuracy": 0.1}] + [told | row for row in rows_of_run(0.0, last=60)]
    none = {"n_snr": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "lr_factor": 0.0}
    rows = [row | none if row["step"] >= 10 else row for row in rows]
    lines = summary(rows, "runs/x", Facts(prompts=32)).splitlines()
    place = next(n for n, line in enumerate(lines) if line.endswith("the same reward, 0 in steps 10 to 60."))
    assert lines[place + 1].startswith("held-out accuracy")
    assert lines[place + 3].endswith(" (x0.50 by the schedule), mean of the last 10 updates")
    assert "critical batch" not in "".join(lines)  # the last steps had no gradient
    top = [told | row | {"step": n} for n, row in enumerate([*RISE, *TOP], start=1)]
    said = "solved: Every completion has had reward 1, the highest seen so far, since step 41."
    assert said in summary(top, "runs/x", Facts(prompts=32))


def test_a_stretch_that_is_told_late_leaves_values_to_go_by():
    """Steps of one reward are usual here, so that it takes 52 of them; what comes next is looked at all the same."""
    usual = [{"reward": float(n % 2), "reward_std": 0.0} for n in range(60)] + [{"reward": 0.5}] * 60
    for then in ([{"reward": 2.0, "reward_std": 0.0}] * 3, [{"reward": 0.7, "reward_std": 0.3}] * 3):
        assert diagnose(usual + then).findings[0].name == "same reward"


@pytest.mark.parametrize(("trainer", "rows"), [("TRL", 2), ("verl", 2), ("mean only", 5)])
def test_where_a_row_is_the_mean_of_ten_steps_a_few_rows_show_it(trainer, rows):
    logged = [LOGGED[trainer][0](row) for row in thinned(rows_of_run(0.0, first=201, last=300, steps=600), 10)]
    watch = Watch(Facts(every=10)).over(logged)
    (finding,) = watch.findings
    assert (finding.name, finding.found) == ("same reward", 200 + 10 * rows)
    assert finding.sentence.endswith("reward, 0 in steps 210 to 300.")
    assert watch.course.outages.explain(360)
    assert not watch.course.outages.explain(370)


def test_many_outages_are_named_in_few_words_and_cost_no_more_than_few():
    differ = {"reward": 0.5, "reward_std": 0.3}
    rows = [AGREE | {"reward": n / 64, "reward_std": 0.0} if k < 60 else differ for n in range(40) for k in range(99)]
    told = Watch().over(rows).course.outages
    assert len(told.reported) == 40
    assert str(told).endswith(", and 37 other rewards")
    assert len(str(told)) < 200
