"""Every condition and illness is on its page; synthetic runs are what they claim to be."""

import re

import numpy as np

from lab.alarms.synthetic import ILLNESSES, STEPS, healthy, ill
from lab.pages import DOCS
from oblrpo.diagnosis import CONDITIONS


def test_every_condition_and_every_illness_is_on_the_page():
    text = (DOCS / "reference" / "conditions.md").read_text("utf-8")
    heads = {head.lower() for head in re.findall(r"^### (.*)$", text, re.MULTILINE)}
    assert heads == {condition.name.lower() for condition in CONDITIONS}
    measured = (DOCS / "lab_book" / "diagnosis.md").read_text("utf-8")
    for name, (_, illness) in ILLNESSES.items():
        assert re.search(rf"^\| {re.escape(name)} \| {illness.finds} \| \d+ of \d+ \|", measured, re.MULTILINE), name


def test_an_ill_run_is_the_healthy_one_up_to_its_onset():
    """But for the level that it would have reached."""
    rows, again = ill("KL runs away", 1), ill("gradient spikes", 1)
    assert rows[:80] == again[:80]
    assert rows[80:] != again[80:]
    assert len(rows) == len(healthy(1)) == STEPS


def test_synthetic_rewards_have_the_noise_of_their_prompts():
    """Of P prompts, whose chance of success differs, and G completions: the deviation of a step's mean reward."""
    ends = [row["reward"] for row in healthy(2)[-60:]]
    assert 0.01 < np.std(np.diff(ends)) / 2**0.5 < 0.2
    assert all(0 <= row["frac_reward_zero_std"] <= 1 for row in healthy(2))
