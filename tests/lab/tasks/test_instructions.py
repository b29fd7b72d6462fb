"""Instructions that a function can check: each of them, their share, and what earns nothing."""

import json
import random
import time

import pytest

from lab.tasks.instructions import CHECKS, FACTS, TEXTS, WORD, InstructionsTask
from oblrpo.tasks import Problem

TEXT = "Bread is baked in the morning by people who get up early."


def problem_of(**conditions):
    return Problem([{"role": "user", "content": "Write."}], json.dumps(conditions), {"subject": "bread"})


def reward(completion, **conditions):
    return InstructionsTask().reward(problem_of(**conditions), completion)


@pytest.mark.parametrize(
    ("conditions", "holds", "fails"),
    [
        ({"words": [12, 12]}, TEXT, TEXT + " Yes."),
        ({"words": [12, 14]}, TEXT, "Bread is baked in the morning."),
        ({"words": [5, 6]}, "A baker's well-known loaf isn't cheap.", "A baker is known to be a cheap man."),
        ({"mention": "bread"}, TEXT, TEXT.replace("Bread", "Breadfruit")),
        ({"bullets": 2}, "Bread:\n- baked at dawn\n  - sold warm", "- Bread is baked\n- in the morning\n- and sold"),
        ({"bullets": 2}, "- Bread is baked\n- in the morning", "- Bread is baked\n in the morning - by people\n- "),
        ({"bullets": 2}, "- Bread is baked\n- in the morning", "* Bread is baked\n* in the morning"),
        ({"ending": "the end"}, TEXT + " The End.", TEXT + " The end of it."),
        ({"ending": "the end"}, TEXT + '\n"the end!"', "The end. " + TEXT),
        ({"no_commas": True}, TEXT, TEXT.replace(" in", ", in")),
        ({"lower_case": True}, TEXT.lower(), TEXT),
    ],
)  # fmt: skip
def test_each_condition(conditions, holds, fails):
    (name,) = conditions
    assert CHECKS[name](holds.strip(), conditions[name])
    assert (reward(holds, **conditions), reward(fails, **conditions)) == (1.0, 0.0)
    assert not CHECKS[name](fails.strip(), conditions[name])


def test_an_empty_bullet_is_none():
    assert not CHECKS["bullets"]("- one\n- \n-", 2)
    assert CHECKS["bullets"]("- one\n- \n-", 1)


def test_the_reward_is_the_share_that_holds():
    conditions = {"words": [12, 15], "no_commas": True, "lower_case": True, "ending": "the end"}
    assert reward(TEXT, **conditions) == 0.5
    assert reward(TEXT + " The end.", **conditions) == 0.75
    assert reward(TEXT.lower() + " the end.", **conditions) == 1.0
    assert reward(TEXT.replace("in", "in,"), **conditions) == 0.25


@pytest.mark.parametrize(
    "completion",
    ["", " \n ", "bread", "the end", "the end " * 6, "bread the end. " * 5, "bread bread bread bread bread bread",
     "- bread\n- bread\n- bread\nthe end", "bread is good the end " * 5, "a b c d the end"],
)  # fmt: skip
def test_silence_and_repetition_earn_nothing(completion):
    assert reward(completion, words=[5, 20], no_commas=True, lower_case=True, ending="the end") == 0.0


def test_hostile_completions_end_soon_and_stay_within_one(hostile):
    (problem,) = InstructionsTask().train_batch(0, 1)
    begin = time.perf_counter()
    assert InstructionsTask().reward(problem, hostile) in (0.0, 1 / 2, 1 / 3, 1 / 4)
    assert time.perf_counter() - begin < 1.0


def test_prompts_ask_for_what_is_checked():
    task, seen = InstructionsTask(), set()
    for problem in task.train_batch(0, 300):
        (message,) = problem.prompt
        assert message["role"] == "user"
        conditions = json.loads(problem.answer)
        assert 2 <= len(conditions) <= 4
        assert all(TEXTS[name].format(wanted) in message["content"] for name, wanted in conditions.items())
        assert problem.columns["subject"] in message["content"]
        seen |= set(conditions)
    assert seen == set(CHECKS) == set(TEXTS)


def test_batches_are_a_function_of_seed_and_step():
    assert InstructionsTask(1).train_batch(2, 8) == InstructionsTask(1).train_batch(2, 8)
    assert InstructionsTask(1).train_batch(2, 8) != InstructionsTask(2).train_batch(2, 8)
    assert InstructionsTask(1).heldout(8) == InstructionsTask(2).heldout(9)[:8]


def test_heldout_subjects_are_not_trained_on():
    task = InstructionsTask()
    heldout = {problem.columns["subject"] for problem in task.heldout(300)}
    trained = {problem.columns["subject"] for step in range(30) for problem in task.train_batch(step, 32)}
    assert len(heldout) >= 12
    assert len(trained) > 150
    assert not heldout & trained


def test_demonstrations_keep_to_everything_and_are_of_uneven_length(demonstrated):
    task = InstructionsTask()
    shown = list(demonstrated(task, 300))
    assert all(task.reward(problem, text) == 1.0 for problem, text in shown)
    lengths = sorted(len(WORD.findall(text)) for _, text in shown)
    assert lengths[30] < 12
    assert 20 < lengths[-30] <= lengths[-1] < 60


def test_noise_breaks_conditions(demonstrated):
    task = InstructionsTask()
    means = [sum(task.reward(*pair) for pair in demonstrated(task, 300, noise)) / 300 for noise in (0.1, 0.4, 1.0)]
    assert 0.97 > means[0] > means[1] + 0.1 > means[2] + 0.3


def test_facts_have_six_to_ten_words_and_no_commas():
    assert all(6 <= len(fact.split()) <= 10 and "," not in fact and "{subject}" in fact for fact in FACTS)
    rng = random.Random(0)
    (problem,) = InstructionsTask().train_batch(0, 1)
    assert InstructionsTask().demonstration(problem, rng, 0.0)
