"""How much completions differ, counted one by one."""

import math
import random
from itertools import permutations

import pytest
import torch

from oblrpo.rollout.variety import answers_of, token_counts, variety


@pytest.mark.parametrize("seed", range(5))
def test_the_shares_are_those_of_all_completions_and_of_all_pairs(seed):
    draw = random.Random(seed)
    texts, answers = draw.choices(["yes", "no", "", "maybe"], k=24), draw.choices("abc", k=24)
    found = variety(texts, torch.tensor([3, 0, 5]), answers)
    pairs = [a == b for (a, of_a), (b, of_b) in permutations(zip(texts, answers, strict=True), 2) if of_a != of_b]
    assert found == {
        "completions/distinct_ratio": len(set(texts)) / 24,
        "completions/commonest_ratio": max(map(texts.count, texts)) / 24,
        "completions/commonest_token_ratio": 5 / 8,
        "completions/same_ratio": pytest.approx(sum(pairs) / len(pairs)),
    }


def test_right_completions_are_never_the_same_and_one_answer_always_is():
    answers = ["yes"] * 19 + ["no"]  # however uneven
    nothing = torch.zeros(3, dtype=torch.long)
    assert variety(answers, nothing, answers)["completions/same_ratio"] == 0
    assert variety(["yes"] * 20, nothing, answers)["completions/same_ratio"] == 1
    alike = variety(["yes"] * 20, nothing, ["yes"] * 20)
    assert math.isnan(alike["completions/same_ratio"])
    assert math.isnan(alike["completions/commonest_token_ratio"])


def test_tokens_are_the_policys_own_without_ends():
    ids_SC = torch.tensor([[5, 5, 1, 0], [5, 7, 2, 5]])
    own_SC = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])
    assert token_counts(ids_SC, own_SC, [1, 2], 8).tolist() == [0, 0, 0, 0, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("answers", "columns", "told"),
    [
        (["4", ""], [{"id": 1}, {"id": 2}], ["4", ""]),
        (["", ""], [{"label": 1}, {"label": 2}], ["{'label': 1}", "{'label': 2}"]),
        (["", ""], [{"source": 1}, {"source": 1}], ["one", "two"]),
        (["4", "4"], [{"id": 1}, {"id": 2}], ["4", "4"]),
    ],
)
def test_answers_tell_prompts_apart_or_what_stands_for_them(answers, columns, told):
    assert answers_of(answers, columns, ["one", "two"]) == told
