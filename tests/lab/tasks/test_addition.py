"""Addition step by step: the verifier, the slips and the forms of a demonstration."""

import random

import pytest

from lab.tasks.addition import AdditionTask, steps
from oblrpo.tasks import Problem
from oblrpo.tasks.arithmetic import SLIPS

PROBLEM = Problem("47+8+55=", "110")


@pytest.mark.parametrize("completion", ["55+55=110", "110", " 110 ", "54+1=110", "55+55= 110", "=110", "55+55=110\n"])
def test_the_last_number_decides(completion):
    assert AdditionTask().reward(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "55", "55+55=111", "110=55", "55+55=110=", "55=110 +", "55=110;", "55 110", "0110", "+110", "110.0", "1 10",
     "55=-110", "11O", "100+10"],
)  # fmt: skip
def test_anything_else_is_wrong(completion):
    assert AdditionTask().reward(PROBLEM, completion) == 0.0


def test_the_answer_is_the_sum_of_the_terms():
    for problem in AdditionTask().train_batch(0, 200):
        terms = [int(term) for term in problem.prompt.removesuffix("=").split("+")]
        assert 3 <= len(terms) <= 5
        assert all(1 <= term <= 9 for term in terms)
        assert int(problem.answer) == sum(terms)


def test_hundreds_of_perturbed_answers_are_rejected(demonstrated):
    task, rng = AdditionTask(), random.Random(0)
    for problem, shown in demonstrated(task, 200):
        place = rng.randrange(len(shown.rpartition("=")[2])) + 1
        digit = rng.choice([digit for digit in "0123456789" if digit != shown[-place]])
        wrong = [shown[: len(shown) - place] + digit + shown[len(shown) - place + 1 :], shown[:-1], shown + shown[-1]]
        assert [task.reward(problem, text) for text in wrong] == [0.0] * 3


def numbers(step):
    return [int(term) for term in step.split("+")]


def test_steps_without_noise():
    assert steps([47, 8, 55, 1], random.Random(0), 0.0) == ["55+55+1", "110+1", "111"]


def test_a_slip_is_carried_into_the_later_steps():
    terms = [47, 8, 55, 30, 2]
    found = set()
    for seed in range(200):
        before = terms
        for step in map(numbers, steps(terms, random.Random(seed), 0.3)):
            found.add(step[0] - before[0] - before[1])
            assert step[1:] == before[2:]
            before = step
    assert found == {0, *SLIPS}


def test_with_noise_one_every_step_is_wrong_and_none_negative():
    for seed in range(100):
        first, second = map(numbers, steps([1, 1, 1], random.Random(seed), 1.0))
        assert first[0] - 2 in SLIPS
        assert second[0] - sum(first) in SLIPS
        assert min(first[0], second[0]) >= 0


def test_demonstrations_show_all_steps_or_the_answer_alone(demonstrated):
    signs = [shown.count("=") for _, shown in demonstrated(AdditionTask(min_terms=4, max_terms=4), 500)]
    assert set(signs) == {0, 2}
    assert 0.1 < signs.count(0) / 500 < 0.3
