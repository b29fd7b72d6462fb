"""Held-out accuracy where completions were masked."""

import math
import random
import time
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from oblrpo.evaluation.sampled import _others, heldout_accuracy
from oblrpo.settings import RolloutConfig
from oblrpo.tasks import Problem


@pytest.mark.parametrize(
    ("valid", "value", "stderr"),
    [
        ([[True, False], [True, True]], 0.625, 0.375),  # the means are 1 and 0.25
        ([[True, False], [False, False]], 1.0, math.nan),
        ([[False, False], [False, False]], math.nan, math.nan),
    ],
)
def test_masked_completions_are_left_out(tiny_policy, valid, value, stderr):
    sampler = SimpleNamespace(sample=lambda *_: SimpleNamespace(said=["1", "9", "0", "5"], ids=None))
    problems = [Problem("a", "1"), Problem("b", "")]
    config = RolloutConfig(prompts_per_step=2, num_generations=2)
    before = torch.random.get_rng_state()
    rewards = [[1.0, 9.0], [0.0, 0.5]]
    found, rows, _ = heldout_accuracy(tiny_policy, lambda *_: (rewards, valid), problems, 2, config, 0, sampler)
    assert (found.value, found.stderr) == pytest.approx((value, stderr), nan_ok=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    earned = [reward if counts else None for reward, counts in zip((1.0, 9.0, 0.0, 0.5), chain(*valid), strict=True)]
    asked = [("a", "1", "1"), ("a", "1", "9"), ("b", "", "0"), ("b", "", "5")]
    assert [(row["prompt"], row["answer"], row["completion"]) for row in rows] == asked
    assert [row["reward"] for row in rows] == earned


@pytest.mark.parametrize(("samples", "sizes"), [(5, [2, 2, 1]), (12, [1] * 5), (99, [1] * 5), (1, [5])])
def test_as_many_completions_are_drawn_at_once_as_in_training(tiny_policy, samples, sizes):
    """12 of a step; at the least those of one problem."""
    drawn = []

    def sample(prompts, count, *_):
        drawn.append(len(prompts))
        return SimpleNamespace(said=["1"] * len(prompts) * samples, ids=None)

    def rewards(part, *_):
        return [[0.5] * samples] * len(part), [[True] * samples] * len(part)

    problems, config = [Problem("a", "1")] * 5, RolloutConfig(prompts_per_step=4, num_generations=3)
    heldout_accuracy(tiny_policy, rewards, problems, samples, config, 0, SimpleNamespace(sample=sample))
    assert drawn == sizes


def test_completions_are_graded_as_answers_to_other_prompts(tiny_policy):
    """Two of the prompts have one answer, and each is graded as the next prompt with another one."""
    texts = ["1", "2", "1", "1", "2", "9"]
    problems = [Problem("a", "1"), Problem("b", "1"), Problem("c", "2")]
    sampler = SimpleNamespace(sample=lambda p, *_: SimpleNamespace(said=texts[: 2 * len(p)], ids=None))

    def right(part, found, *_):
        graded = [[float(found[2 * p + g] == each.answer) for g in range(2)] for p, each in enumerate(part)]
        return graded, [[True, True]] * len(part)

    config = RolloutConfig(prompts_per_step=3, num_generations=2)
    accuracy, _, loss = heldout_accuracy(tiny_policy, right, problems, 2, config, 0, sampler, swap=True)
    assert accuracy.value == pytest.approx((0.5 + 1 + 0.5) / 3)
    losses = [0.5 - 0.5, 1.0 - 0.0, 0.5 - 0.0]
    assert loss.value == pytest.approx(sum(losses) / 3)
    assert loss.stderr == pytest.approx(torch.tensor(losses).std().item() / 3**0.5)
    assert heldout_accuracy(tiny_policy, right, problems[:2], 2, config, 0, sampler, swap=True)[2] is None
    assert heldout_accuracy(tiny_policy, right, problems, 2, config, 0, sampler)[2] is None


def test_completions_are_swapped_with_the_next_other_answer_in_time_proportional_to_the_prompts():
    draw = random.Random(0)
    for size in (2, 3, 8, 20):
        answers = draw.choices("aab", k=size)
        following = [[q % size for q in range(p + 1, p + size) if answers[q % size] != answers[p]] for p in range(size)]
        assert _others(answers) == [first[0] for first in following if first]
    start = time.process_time()
    assert _others(["no"] * 40_000 + ["yes"])[:2] == [40_000] * 2
    assert time.process_time() - start < 2
