"""The votes for a problem's answers: equal ones together, few questions, a limit on slow ones."""

import pytest

from oblrpo.evaluation.evaluate import MOST_SLOW, Votes, count_votes
from oblrpo.tasks.grading import MathVerifier, Verdict


class Verifier:
    """Numbers are equal by value, anything with `^` takes too long; counts those."""

    def __init__(self):
        self.late = 0

    def compare(self, golds, answers):
        return [self.one(gold, answer) for gold, answer in zip(golds, answers, strict=True)]

    def one(self, golds, answer):
        [gold] = golds  # of several, an answer would have to list all
        if "^" in answer + gold:
            self.late += 1
            return Verdict(False, "timeout", answer)
        return Verdict(float(gold) == float(answer), "ok", answer)


def wrong(*answers):
    return [Verdict(False, "ok" if answer else "unparsable", answer) for answer in answers]


def test_equal_answers_are_one():
    verdicts = [Verdict(True, "ok", "7"), *wrong("1", "2", "1.0", "", "2.00", "3", "1")]
    assert count_votes(verdicts, Verifier()) == Votes(1, [3, 2, 1], 1)


def test_equal_answers_are_one_by_the_verifier_of_evaluations():
    with MathVerifier() as verifier:
        votes = count_votes(wrong("1/2", "3", "0.5", r"\sqrt{4}", "3.0", "x+", "2"), verifier)
    assert votes == Votes(0, [2, 2, 2, 1], 0)


@pytest.mark.parametrize("first", [["2^9"], ["5"]], ids=["slow first", "slow later"])
def test_slow_answers_are_given_up(first):
    """Each stays an answer of its own, and what came first in its spelling gathers its votes."""
    verifier, towers = Verifier(), [f"9^{n}" for n in range(50)]
    votes = count_votes(wrong(*first, *towers, "5", "9^0"), verifier)
    assert verifier.late == MOST_SLOW
    assert (sum(votes.others), max(votes.others)) == (53, 2)
    assert votes.uncompared >= 50


def test_a_slow_answer_does_not_hold_up_the_others():
    assert count_votes(wrong("1", "2^9", "1.0", "2", "2.0"), Verifier()) == Votes(0, [2, 1, 2], 0, 1)
