"""Countdown: what solves a problem, what does not, and how solutions are shown."""

import random
import re

import pytest

from lab.tasks.countdown import STYLES, CountdownTask, blur, follow, parse_question, plans
from oblrpo.tasks import Problem

PROBLEM = Problem("3,5,7>22=", "3,5,7>22")

RIGHT = [
    "3*5+7", "7+3*5", "5*3+7", "(3*5)+7", "((3)*(5))+7", "7+(5*3)", "3 * 5 + 7", "3*5+7=22", "3*5+7 = 22",
    "3*5=15,15+7=22", "5*3=15,7+15=22", "3*5=15,15+7", "3*5 = 15, 15 + 7 = 22",
    "3*5=15,15+7=22,22",
]  # fmt: skip
WRONG = [
    "22", "3*5", "3*5+8", "3+5+7", "3*5+7+0", "3*5+7*1", "3*5+7-7+7", "3*7+1", "15+7", "5*5-3", "3*5+7=23", "3*5+7=",
    "=22",
    "3*5=15", "3*5=15,15+7=23", "3*5=14,14+7=22", "3*5=14,15+7=22", "3*5=15,3*5+7=22", "3*5=15,22",
    "3*5=15=15,15+7=22", "3*5=15,15+7=22=22", "3*5=15,,15+7=22", ",3*5+7", "3*5+7,", "3*5=15,15+7=22,",
    "3*5=15;15+7=22",
    "3*5,15+7=22", "7/3=7/3,22", "3-5=-2,7", "-3*-5+7", "3*5--7", "3,5,7", "3*5=015,15+7=22", "3*5=15.0,15+7=22",
    "3*5=\u0661\u0665,15+7=22", "3*5+7#",
]  # fmt: skip


@pytest.mark.parametrize("completion", RIGHT)
def test_right_solutions(completion):
    assert CountdownTask().reward(PROBLEM, completion) == 1.0


@pytest.mark.parametrize("completion", WRONG)
def test_wrong_solutions(completion):
    assert CountdownTask().reward(PROBLEM, completion) == 0.0


@pytest.mark.parametrize(
    ("question", "completion", "reward"),
    [
        ("2,3,8>12", "8/2*3", 1.0),
        ("2,3,8>12", "3/2*8", 1.0),  # through a fraction, exactly
        ("2,3,8>12", "3/2=1,1*8=12", 0.0),  # a step may not round
        ("2,7,7>10", "7/2=3,3+7=10", 0.0),
        ("2,7,7>10", "7/2=7/2,3+7=10", 0.0),  # nor keep a fraction
        ("3,3,5>14", "3*3+5", 1.0),
        ("3,3,5>14", "3*3+5*1", 0.0),
        ("3,3,5>8", "3+5", 0.0),  # both threes must be used
        ("3,5,7>5", "3-5+7", 1.0),  # below zero on the way
        ("1,1,1>1", "1*1=1,1*1=1", 1.0),
        ("1,1,1>1", "1*1=1,1*1=1,1*1=1", 0.0),
    ],
)
def test_each_number_is_used_exactly_once(question, completion, reward):
    assert CountdownTask().reward(Problem(question + "=", question), completion) == reward


def test_a_long_solution_is_refused():
    assert CountdownTask().reward(PROBLEM, "3*5+7" + " " * 195) == 1.0
    assert CountdownTask().reward(PROBLEM, "3*5+7" + " " * 196) == 0.0


def test_problems_have_the_numbers_and_a_target_in_range():
    for problem in CountdownTask(count=4, largest=12).train_batch(0, 100):
        numbers, target = parse_question(problem.answer)
        assert problem.prompt == f"{','.join(map(str, numbers))}>{target}="
        assert len(numbers) == 4
        assert all(1 <= number <= 12 for number in numbers)
        assert 1 <= target <= 99


def test_hundreds_of_perturbed_solutions_are_rejected(demonstrated):
    task = CountdownTask()
    for problem, shown in demonstrated(task, 100):
        question, _, target = problem.answer.rpartition(">")
        other = Problem("", f"{question}>{int(target) + 1}")
        wrong = [shown + "+0", "1*" + shown, re.sub("[0-9]+", lambda found: found[0] + "0", shown, count=1)]
        assert [task.reward(problem, text) for text in wrong] == [0.0] * 3
        assert task.reward(other, shown) == 0.0


def test_every_plan_reaches_the_target_in_every_style():
    for numbers, target in [([3, 5, 7], 22), ([1, 1, 2, 6], 12), ([9, 4], 5)]:
        found = plans(tuple(numbers), target)
        assert found
        for plan in found:
            for style in STYLES:
                value, text = follow(numbers, plan, style)
                assert value == target
                question = f"{','.join(map(str, numbers))}>{target}"
                assert CountdownTask().reward(Problem("", question), text) == 1.0


def test_all_solutions_of_a_problem_are_found():
    texts = {follow([3, 5, 7], plan, "plain")[1] for plan in plans((3, 5, 7), 22)}
    assert texts == {"3*5+7", "5*3+7", "7+3*5", "7+5*3"}


@pytest.mark.parametrize(
    ("plan", "plain", "parentheses", "steps"),
    [
        ((("-", 0, 1), ("-", 0, 1)), "7-(9-4)", "7-(9-4)", "9-4=5,7-5=2"),
        ((("+", 0, 1), ("*", 1, 0)), "(9+4)*7", "(9+4)*7", "9+4=13,13*7=91"),
        ((("*", 0, 1), ("+", 1, 0)), "9*4+7", "(9*4)+7", "9*4=36,36+7=43"),
        ((("+", 0, 2), ("-", 1, 0)), "9+7-4", "(9+7)-4", "9+7=16,16-4=12"),
    ],
)
def test_styles(plan, plain, parentheses, steps):
    assert [follow([9, 4, 7], plan, style)[1] for style in ("plain", "parentheses", "steps")] == [
        plain,
        parentheses,
        steps,
    ]


def test_noise_one_changes_every_operator_and_noise_zero_none():
    plan = (("*", 0, 1), ("-", 1, 0))
    assert blur(plan, random.Random(0), 0.0) == plan
    for seed in range(50):
        (first, *places), (second, *others) = blur(plan, random.Random(seed), 1.0)
        assert (places, others) == ([0, 1], [1, 0])
        assert first in "+-"
        assert second in "+*"


def test_noisy_steps_are_right_sums_that_go_on_from_the_wrong_value(demonstrated):
    task, seen = CountdownTask(), 0
    for problem, shown in demonstrated(task, 200, noise=0.5):
        if "=" in shown:
            numbers = problem.answer.partition(">")[0]
            value = shown.rpartition("=")[2]
            assert task.reward(Problem("", f"{numbers}>{value}"), shown) == 1.0
            seen += task.reward(problem, shown) == 0.0
    assert seen > 20
