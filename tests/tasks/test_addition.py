"""Running sums: the verifier, the slips and the forms of a demonstration."""

import random

import pytest

from oblrpo.tasks import AdditionTask, Problem
from oblrpo.tasks.addition import SLIPS, running_sums

PROBLEM = Problem("47+8+55=", "110")


@pytest.mark.parametrize("completion", ["55,110", "110", " 110 ", "54,110", "55, 110", ",110", "55,110\n"])
def test_the_last_number_decides(completion):
    assert AdditionTask().reward(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "55",
        "55,111",
        "110,55",
        "55,110,",
        "55,110 =",
        "55,110;",
        "55 110",
        "0110",
        "+110",
        "110.0",
        "1 10",
        "55,-110",
        "11O",
    ],
)
def test_anything_else_is_wrong(completion):
    assert AdditionTask().reward(PROBLEM, completion) == 0.0


def test_the_answer_is_the_sum_of_the_terms():
    for problem in AdditionTask().train_batch(0, 200):
        terms = [int(term) for term in problem.prompt.removesuffix("=").split("+")]
        assert 2 <= len(terms) <= 5
        assert all(1 <= term <= 99 for term in terms)
        assert int(problem.answer) == sum(terms)


def test_hundreds_of_perturbed_answers_are_rejected(demonstrated):
    task, rng, rejected = AdditionTask(), random.Random(0), 0
    for problem, shown in demonstrated(task, 200):
        place = rng.randrange(len(shown.rpartition(",")[2])) + 1
        digit = rng.choice([digit for digit in "0123456789" if digit != shown[-place]])
        wrong = [shown[: len(shown) - place] + digit + shown[len(shown) - place + 1 :], shown[:-1], shown + shown[-1]]
        assert [task.reward(problem, text) for text in wrong] == [0.0] * 3
        rejected += 3
    assert rejected == 600


def test_running_sums_without_noise():
    assert running_sums(47, [8, 55, 1], random.Random(0), 0.0) == [55, 110, 111]


def test_a_slip_is_carried_into_the_later_sums():
    terms = [8, 55, 30, 2]
    for seed in range(200):
        sums = running_sums(47, terms, random.Random(seed), 0.3)
        slips = [after - before - term for before, after, term in zip([47, *sums], sums, terms, strict=False)]
        assert set(slips) <= {0, *SLIPS}


def test_with_noise_one_every_sum_is_wrong_and_none_negative():
    for seed in range(100):
        first, second = running_sums(1, [1, 1], random.Random(seed), 1.0)
        assert first - 2 in SLIPS
        assert second - first - 1 in SLIPS
        assert min(first, second) >= 0


def test_demonstrations_show_all_sums_or_the_answer_alone(demonstrated):
    commas = [shown.count(",") for _, shown in demonstrated(AdditionTask(min_terms=4, max_terms=4), 500)]
    assert set(commas) == {0, 2}
    assert 0.1 < commas.count(0) / 500 < 0.3
