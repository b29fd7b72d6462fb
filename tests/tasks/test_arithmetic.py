"""Sums under solved ones: what counts, and that no held-out question is asked or solved in training."""

import operator
import random

import pytest

from oblrpo.tasks import Problem, make_task

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PROBLEM = Problem("12+25=37\n40+13=53\n31+46=", "77")


@pytest.mark.parametrize("completion", ["77", " 77", "77 ", "77\n12+3=15", "77\n", "77\n\n78", "77\n77"])
def test_the_first_line_decides(completion):
    assert make_task("arithmetic").reward(PROBLEM, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "\n77", "7", "777", "77.", "77 is it", "77, so", "+77", "077", "77.0", "78\n77", "7 7", "\t77", "77\r\n",
     "77+0", "31+46=77", "\uff17\uff17", "77\x00"],
)  # fmt: skip
def test_anything_else_is_wrong(completion):
    assert make_task("arithmetic").reward(PROBLEM, completion) == 0.0


def test_hostile_completions_earn_nothing(hostile):
    assert make_task("arithmetic").reward(PROBLEM, hostile) == 0.0


def lines_of(problem):
    *solved, question = problem.prompt.split("\n")
    return [line.partition("=")[0] for line in solved], question.rstrip("=")


@pytest.mark.parametrize("parameters", [{}, {"operations": "+-*", "largest": 12}, {"shots": 0}, {"shots": 8}])
def test_prompts_are_right_and_lines_are_different(parameters):
    task = make_task("arithmetic", **parameters)
    signs = set()
    for problem in [*task.train_batch(0, 200), *task.heldout(12)]:
        *solved, question = problem.prompt.split("\n")
        assert len(solved) == parameters.get("shots", 3)
        assert len({*solved, question + problem.answer}) == len(solved) + 1
        for line in [*solved, question + problem.answer]:
            left, _, right = line.partition("=")
            sign = next(each for each in SIGNS if each in left)
            assert SIGNS[sign](*map(int, left.split(sign))) == int(right) >= 0
            signs |= {sign}
    assert signs == set(parameters.get("operations", "+"))


def test_batches_are_a_function_of_seed_and_step():
    task = make_task("arithmetic", 3)
    assert task.train_batch(5, 16) == make_task("arithmetic", 3).train_batch(5, 16)
    assert task.train_batch(5, 16) != task.train_batch(6, 16)
    assert task.train_batch(5, 16) != make_task("arithmetic", 4).train_batch(5, 16)
    assert task.heldout(20) == make_task("arithmetic", 4).heldout(40)[:20]


def test_no_heldout_question_is_asked_or_solved_in_training():
    task = make_task("arithmetic")
    heldout = {lines_of(problem)[1] for problem in task.heldout(300)}
    assert 25 < len(heldout) < 60
    for step in range(100):
        for problem in task.train_batch(step, 16):
            solved, question = lines_of(problem)
            assert not heldout & {question, *solved}
            assert "+".join(reversed(question.split("+"))) not in heldout
    assert not heldout & {line for problem in task.heldout(300) for line in lines_of(problem)[0]}


def test_demonstrations_are_right_but_for_slips(demonstrated):
    task = make_task("arithmetic")
    assert all(task.reward(problem, shown) == 1.0 for problem, shown in demonstrated(task, 100))
    noisy = [task.reward(problem, shown) for problem, shown in demonstrated(task, 400, 0.3)]
    assert 0.6 < sum(noisy) / 400 < 0.8
    (problem,) = task.train_batch(0, 1)
    assert task.reward(problem, task.demonstration(problem, random.Random(0), 1.0)) == 0.0
