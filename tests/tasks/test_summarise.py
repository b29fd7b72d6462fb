"""Summaries: the passages that ship, the overlap in words, and what a task keeps to."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblrpo.errors import InputError
from oblrpo.tasks import Problem, make_task
from oblrpo.tasks.overlap import longest_common_subsequence, rouge_l
from oblrpo.tasks.summarise import read_passages

PROBLEM = Problem("The cat sat.\nSummary:\n", "The cat sat on the mat.\nA cat on a mat")


@pytest.mark.parametrize(
    ("reference", "text", "value"),
    [  # the last three as rouge-score 0.1.2 has them
        ("the cat sat", "the cat sat", 1.0),
        ("The cat sat.", "the CAT -- sat", 1.0),
        ("the cat sat", "sat cat the", 1 / 3),
        ("the cat sat", "", 0.0),
        ("", "the cat", 0.0),
        ("the cat sat", "dogs", 0.0),
        ("the cat sat", "the the the the the the", 2 / 9),
        ("Paul's lost ring came back on a carrot.", "Paul lost a ring, a carrot had it", 0.5882352941176471),
        ("The ferry left at noon", "At noon the first ferry left the harbour at last", 0.5333333333333333),
        ("police killed the gunman", "police kill the gunman", 0.75),
    ],
)
def test_rouge_l(reference, text, value):
    assert rouge_l(reference, text) == pytest.approx(value, abs=1e-15)


def by_table(first, second):
    row = [0] * (len(second) + 1)
    for a in first:
        before = row
        row = [0]
        for place, b in enumerate(second):
            row.append(before[place] + 1 if a == b else max(before[place + 1], row[place]))
    return row[-1]


@given(st.lists(st.sampled_from("abcd"), max_size=70), st.lists(st.sampled_from("abcde"), max_size=70))
def test_the_longest_common_subsequence_is_that_of_the_table(first, second):
    assert longest_common_subsequence(first, second) == by_table(first, second)


def test_the_better_summary_counts():
    task = make_task("summarise")
    assert task.reward(PROBLEM, "a cat on a mat") == task.reward(PROBLEM, "The cat sat on the mat") == 1.0
    assert task.rewards([PROBLEM, PROBLEM], ["a cat on a mat", "no"]) == [1.0, 0.0]


def test_length_does_not_pay():
    task = make_task("summarise")
    everything = " ".join(passage for passage, _ in read_passages())
    for passage, summaries in read_passages():
        problem = Problem("", "\n".join(summaries))
        right = task.reward(problem, summaries[0])
        assert right == 1.0
        assert task.reward(problem, f"{summaries[0]} {summaries[0]}") < 0.75
        assert task.reward(problem, passage) < 0.75
        assert task.reward(problem, everything) < 0.02
        assert task.reward(problem, summaries[0].split()[0]) < 0.5


@given(st.text())
def test_rewards_of_any_text_are_between_0_and_1(text):
    assert 0.0 <= make_task("summarise").reward(PROBLEM, text) <= 1.0


def test_hostile_completions_earn_nothing_fast(hostile):
    start = time.perf_counter()
    assert make_task("summarise").reward(PROBLEM, hostile) < 0.1
    assert time.perf_counter() - start < 10


def test_the_passages_are_as_the_docs_say():
    passages = read_passages()
    assert len({passage for passage, _ in passages}) == 72
    for passage, summaries in passages:
        assert 60 <= len(passage) <= 220
        assert len(set(summaries)) == 2
        assert all(15 <= len(summary) <= 60 for summary in summaries)
        assert all(text.isascii() and text.isprintable() for text in (passage, *summaries))


def test_heldout_passages_are_never_trained_on():
    held = make_task("summarise", 5).heldout(17)
    assert make_task("summarise").heldout(4) == held[:4]
    trained = {
        p.prompt for seed in (0, 5) for step in range(-3, 9) for p in make_task("summarise", seed).train_batch(step, 16)
    }
    assert len(trained) == 55
    assert len({p.prompt for p in held} | trained) == 72
    with pytest.raises(InputError, match="has 17 held-out passages, but 18 were asked for; set eval_prompts lower"):
        make_task("summarise").heldout(18)


@pytest.mark.parametrize("size", [1, 16, 55, 64, 200])
def test_batches_are_a_function_of_seed_step_and_size(size):
    batch = make_task("summarise", 3).train_batch(2, size)
    assert batch == make_task("summarise", 3).train_batch(2, size)
    assert batch != make_task("summarise", 4).train_batch(2, size)
    assert len(batch) == size
    assert len({problem.prompt for problem in batch}) == min(size, 55)


def test_an_epoch_shows_no_passage_twice():
    seen = [p.prompt for step in range(5) for p in make_task("summarise").train_batch(step, 11)]
    assert len(seen) == len(set(seen)) == 55


def test_demonstrations_get_worse_with_noise():
    task, rng = make_task("summarise"), random.Random(0)
    problems = task.train_batch(0, 55)
    means = [
        sum(task.reward(p, task.demonstration(p, rng, noise)) for p in problems) / 55 for noise in (0.0, 0.2, 0.5, 1.0)
    ]
    assert means[0] == 1.0
    assert means == sorted(means, reverse=True)
    assert means[2] < 0.7
    assert means[3] < 0.3


def test_demonstrations_are_a_function_of_the_generator():
    task = make_task("summarise")
    (problem,) = task.train_batch(0, 1)
    shown = [task.demonstration(problem, random.Random(seed), 0.3) for seed in (*range(30), *range(30))]
    assert shown[:30] == shown[30:]
    assert len(set(shown)) > 5
