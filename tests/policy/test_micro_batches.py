from itertools import combinations

import pytest
import torch

from oblrpo.policy.sequences import MicroBatches, Sequences, of_like_length, pad, rows_of

G = 2


def sequences_of(lengths):
    """Prompts of one token; completions of these many."""
    completion_SC, mask_SC = pad([[1] * length for length in lengths], 0, left=False, device="cpu")
    prompt_SQ = torch.ones(len(lengths), 1, dtype=torch.long)
    return Sequences.of(prompt_SQ, torch.ones_like(prompt_SQ), completion_SC, mask_SC)


def test_without_a_bound_prompts_keep_their_order():
    sequences = sequences_of([3, 9, 1, 1, 5, 5])
    assert [each.tolist() for each in MicroBatches().of(sequences, G)] == [[0, 1, 2]]
    assert [each.tolist() for each in MicroBatches(prompts=2).of(sequences, G)] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (60, [[0, 2, 1]]),  # three groups of two rows of ten
        (59, [[0], [2, 1]]),  # two of like size, and not 40 and 8 tokens
        (40, [[0], [2, 1]]),
        (24, [[0], [2, 1]]),
        (19, [[0], [2], [1]]),  # no group fits: each alone
    ],
)
def test_a_budget_takes_groups_of_like_length_together(tokens, expected):
    sequences = sequences_of([3, 9, 1, 1, 5, 5])
    found = MicroBatches(tokens=tokens).of(sequences, G)
    assert [each.tolist() for each in found] == expected
    for each in found:
        assert len(each) == 1 or sequences.at(rows_of(each, G)).flush_left()[0].numel() <= tokens


@pytest.mark.parametrize("tokens", [1, 30, 64, 100, 333, 1000])
def test_micro_batches_are_as_few_as_can_be_and_of_like_size(tokens):
    """Of every bound that takes no more of them theirs is the least."""
    torch.manual_seed(tokens)
    sequences = sequences_of(torch.randint(1, 30, (40,)).tolist())

    def sizes(bound):
        found = MicroBatches(tokens=bound).of(sequences, 1)
        return [sequences.at(rows_S).flush_left()[0].numel() for rows_S in found]

    found = sizes(tokens)
    assert max(found) <= max(tokens, 30)
    fewer = sizes(max(found) - 1)
    assert len(fewer) > len(found) or max(fewer) == max(found), "a longest row alone"
    assert sorted(torch.cat(MicroBatches(tokens=tokens).of(sequences, 1)).tolist()) == [*range(40)]


def test_the_last_micro_batch_is_no_remainder():
    sequences = sequences_of([9] * 32)  # of ten tokens each
    assert [len(each) for each in MicroBatches(tokens=150).of(sequences, 1)] == [11, 11, 10]


def test_both_bounds_hold():
    sequences = sequences_of([3, 9, 1, 1, 5, 5])
    assert [each.tolist() for each in MicroBatches(1, 60).of(sequences, G)] == [[0], [2], [1]]


def test_rows_are_those_of_whole_groups():
    assert rows_of(torch.tensor([2, 0]), 3).tolist() == [6, 7, 8, 0, 1, 2]


@pytest.mark.parametrize("extra", [0, 3, 10, 40])
def test_slices_of_like_length_cost_least_of_all(extra):
    """Every cut of the sorted rows is tried."""
    torch.manual_seed(extra)
    lengths_S = torch.randint(1, 12, (9,))

    def cost(slices):
        return sum(len(rows) * int(lengths_S[rows].max()) + extra for rows in slices)

    order_S = lengths_S.argsort()
    every = [order_S.tensor_split(cuts) for number in range(9) for cuts in combinations(range(1, 9), number)]
    found = of_like_length(lengths_S, extra)
    assert cost(found) == min(map(cost, every))
    assert all(rows.tolist() == sorted(rows.tolist()) for rows in found)
    assert sorted(torch.cat(found).tolist()) == list(range(9))
    longest = [int(lengths_S[rows].max()) for rows in found]
    assert longest == sorted(longest, reverse=True)


def test_slices_go_from_one_of_all_rows_to_one_a_length():
    lengths_S = torch.tensor([4, 1, 4, 2])
    assert [rows.tolist() for rows in of_like_length(lengths_S, 100)] == [[0, 1, 2, 3]]
    assert [rows.tolist() for rows in of_like_length(lengths_S, 0)] == [[0, 2], [3], [1]]
