"""Policies that say one thing to every prompt, and those whose answers are one word."""

import pytest

from oblrpo.diagnosis import Facts, Watch, diagnose
from oblrpo.report.console import summary

SAME, COMMONEST, TOKEN = (f"completions/{name}_ratio" for name in ("same", "commonest", "commonest_token"))
LENGTH = "completions/mean_length"


def learned(steps=60, **last):
    """A task that is learned until step 30, with what texts are at its end; None: not logged."""
    rows = []
    for step in range(1, steps + 1):
        part = min(1.0, step / 30)
        row = {"step": step, "reward": 0.1 + 0.9 * part, "reward_std": 0.3 * (1 - part), "reward_max": 1.0,
               "entropy": 1.5, "grad_norm": 1.0}  # fmt: skip
        row |= dict.fromkeys(("reward_min", "frac_reward_zero_std"), float(part == 1))
        texts = {SAME: 0.8, COMMONEST: 0.9, TOKEN: 0.2, LENGTH: 16.0} | last
        rows.append(row | {key: value if key == LENGTH else value * part for key, value in texts.items() if value})
    return rows


@pytest.mark.parametrize(
    ("last", "cheats"),
    [
        ({SAME: 0.9}, True),
        ({SAME: 0.5}, False),  # as many as of two answers
        ({SAME: 0.5, TOKEN: 0.99}, True),  # w, as often as it can
        ({SAME: 0.5, TOKEN: 0.99, LENGTH: 2.0}, False),  # a word
        ({SAME: 0.01, COMMONEST: 0.2, TOKEN: 0.99}, False),  # as many letters as asked for
        ({SAME: 0.01, COMMONEST: 0.05, TOKEN: 0.99}, True),  # any number of letters
        ({SAME: None, COMMONEST: 1.0, TOKEN: 0.99}, False),  # the one answer that all prompts have
    ],
)
def test_a_run_that_cheats_is_not_solved(last, cheats):
    found, told = diagnose(rows := learned(**last)), {"learning_rate": 1e-3, "lr_factor": 1.0, "step_time": 1.0}
    assert ("solved: " in summary([told | row for row in rows], "runs/x", Facts())) is not cheats
    assert [each.name for each in found.findings] == ["one answer pays"] * cheats
    assert [each.name for each in found.notes] == ["solved"] * (not cheats)
    assert ("one answer pays" in found.unchecked) == (last[SAME] is None)


def test_where_all_answers_are_the_same_one_answer_is_no_illness():
    """Their rewards and lengths agree, too; in a log without texts that is all there is."""
    same = {"reward": 0.6, "reward_std": 0.0, "frac_reward_zero_std": 1.0, LENGTH: 9.0, SAME: None}
    rows = [{"step": step, "reward_std": 0.2, "reward": 0.5 + step % 3 / 50, LENGTH: 60.0 + step, SAME: None}
            | (same if step > 5 and step % 3 else {}) for step in range(1, 46)]  # fmt: skip
    assert "one answer" not in Watch().over(rows).found
    assert "one answer" in Watch().over({key: value for key, value in row.items() if key != SAME} for row in rows).found


def test_the_sentence_says_what_was_earned_for_what():
    (text,) = diagnose(learned(**{SAME: 0.9})).findings
    assert "risen from 0.27 to 1.00" in text.sentence
    assert "the same text in 90% of all pairs" in text.sentence
    (token,) = diagnose(learned(**{SAME: 0.5, TOKEN: 0.99})).findings
    assert "99% of all tokens are one and the same" in token.sentence


def test_a_policy_that_comes_to_read_the_prompt_is_a_note():
    """As one is that says no at first to all of a data set whose answers are nearly all no."""
    rows = learned(60, **{SAME: 0.95})
    rows += [rows[-1] | {"step": 60 + step, SAME: 0.0} for step in range(1, 31)]
    found = diagnose(rows)
    assert not found.findings
    assert [each.name for each in found.notes] == ["solved", "one answer pays"]
    assert "was paid" in found.notes[1].sentence
    assert "recovered since" in found.notes[1].sentence


def test_one_answer_that_pays_little_is_named_until_the_reward_rises():
    def row(step, reward, same):
        return {"step": step, "reward": reward + step % 2 / 50, "reward_std": 0.4, "reward_max": 1.0, "reward_min": 0.0,
                "entropy": 1.0, SAME: same, LENGTH: 3.0}  # fmt: skip

    stuck = [row(step, 0.5, min(0.9, step / 30)) for step in range(1, 61)]
    (finding,) = diagnose(stuck).findings
    assert (finding.name, "earn 0.51 on average" in finding.sentence) == ("one answer", True)
    risen = [row(step, min(0.85, 0.5 + (step - 60) / 30), 0.1) for step in range(61, 101)]
    assert not diagnose(stuck + risen).findings


def test_figures_of_what_still_holds_are_those_of_the_end_and_it_is_told_once():
    rows = [{"step": step, "reward": 0.8 + step % 2 / 50} for step in range(1, 41)]
    rows += [{"step": 40 + step, "reward": max(0.1, 0.8 - step / 40) + step % 2 / 50} for step in range(1, 61)]
    watch, told = Watch(), []
    for row in rows:
        told += [(each.found, each.sentence) for each in watch.observe(row)]
    ((found, said),) = [one for one in told if "fallen" in one[1]]
    finding = watch.findings[0]
    assert "0.110, down from 0.810" in finding.sentence
    assert "0.110" not in said
    assert (finding.found, finding.until) == (found, 100)
    assert finding.since < found < 70
    rows += [{"step": 100 + step, "reward": 0.3 + step % 2 / 50} for step in range(1, 31)]
    again = diagnose(rows).findings[0]
    assert "0.310, down from 0.810" in again.sentence
