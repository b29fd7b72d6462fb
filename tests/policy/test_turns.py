"""Rows in which tools have words: whose tokens they are is kept by all that takes rows apart and puts them together."""

import random

import pytest
import torch

from oblrpo.policy import Sequences
from oblrpo.policy.sequences import MicroBatches, of_like_length, pad

G = 3
CPU = torch.device("cpu")


def drawn(seed, count=12):
    """Prompts and completions as lists of (token, whose); some completions have no token of the policy's own."""
    draw = random.Random(seed)
    rows = []
    for row in range(count):
        prompt = [(draw.randrange(1, 99), "p") for _ in range(draw.randrange(1, 6))]
        whose = "t" if row % 5 == 4 else "ot"
        completion = [(draw.randrange(1, 99), draw.choice(whose)) for _ in range(draw.randrange(1, 9))]
        rows.append((prompt, completion))
    return rows


def sequences_of(rows):
    prompts, masks = pad([[token for token, _ in prompt] for prompt, _ in rows], 0, left=True, device=CPU)
    completions, real = pad([[token for token, _ in each] for _, each in rows], 0, left=False, device=CPU)
    own, _ = pad([[int(whose == "o") for _, whose in each] for _, each in rows], 0, left=False, device=CPU)
    parts = ([prompts, completions], [masks, real], [torch.zeros_like(masks), own])
    return Sequences(*(torch.cat(part, 1) for part in parts), prompts.shape[1])


def rows_in(sequences):
    """The rows that the rectangle says, read token by token."""
    found = []
    for ids, mask, own in zip(
        *(x.tolist() for x in (sequences.ids_ST, sequences.mask_ST, sequences.own_ST)), strict=True
    ):
        real = [
            (token, place, mine) for place, (token, there, mine) in enumerate(zip(ids, mask, own, strict=True)) if there
        ]
        assert not any(mine for mine, there in zip(own, mask, strict=True) if not there)
        prompt = [(token, "p") for token, place, _ in real if place < sequences.start]
        said = [(token, "o" if mine else "t") for token, place, mine in real if place >= sequences.start]
        found.append((prompt, said))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_rows_taken_apart_and_joined(seed):
    rows = drawn(seed)
    whole = sequences_of(rows)
    assert rows_in(whole) == rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    blocks = [whole.at(block) for block in order.split([5, 1, 4, 2])]
    for block in blocks:
        assert block.mask_ST[:, 0].any()
        assert block.mask_ST[:, -1].any()
    assert rows_in(Sequences.join(blocks)) == [rows[row] for row in order.tolist()]
    assert rows_in(whole.at(slice(3, 7))) == rows[3:7]
    assert whole.lengths_S.tolist() == [sum(whose == "o" for _, whose in each) for _, each in rows]
    assert whole.tokens == sum(whose != "t" for each in rows for part in each for _, whose in part)


def test_rows_moved_to_the_left_keep_every_word():
    rows = drawn(5)
    ids_ST, first_S = sequences_of(rows).flush_left()
    for ids, first, (prompt, completion) in zip(ids_ST.tolist(), first_S.tolist(), rows, strict=True):
        assert first == len(prompt)
        assert ids[: first + len(completion)] == [token for token, _ in prompt + completion]


def test_what_is_said_of_tokens_is_said_of_the_policys_own():
    rows = drawn(6)
    whole = sequences_of(rows)
    values_SC = torch.arange(1.0, 1 + whole.own_SC.numel()).view_as(whole.own_SC)
    blocks = [torch.tensor([4, 0, 9]), torch.tensor([7])]
    parts = [values_SC[block][:, : whole.at(block).own_SC.shape[1]] for block in blocks]
    found_SC = whole.by_token(blocks, parts)
    for row, (_, completion) in enumerate(rows):
        for place, (_, whose) in enumerate(completion):
            if whose == "t":
                assert found_SC[row, place] == 0
            elif row in {0, 4, 7, 9}:
                assert found_SC[row, place] == values_SC[row, place]
            else:
                assert found_SC[row, place].isnan()
        assert not found_SC[row, len(completion) :].any()


@pytest.mark.parametrize("tokens", [40, 70, 200])
def test_a_bound_on_tokens_is_on_all_that_go_through_the_model(tokens):
    """The words of tools among them: they are read, and what they take is taken."""
    rows = drawn(7)
    whole = sequences_of(rows)
    for block_P in MicroBatches(tokens=tokens).of(whole, G):
        rows_S = (block_P[:, None] * G + torch.arange(G)).flatten()
        longest = max(len(rows[row][0]) + len(rows[row][1]) for row in rows_S.tolist())
        assert len(rows_S) * longest <= tokens or len(block_P) == 1
    lengths_S = whole.mask_ST.sum(1)
    assert lengths_S.tolist() == [len(prompt) + len(completion) for prompt, completion in rows]
    assert sorted(torch.cat(of_like_length(lengths_S, 5)).tolist()) == [*range(len(rows))]
