"""What advantages are divided by and multiplied with, by hand."""

import math

import pytest
import torch

from oblrpo.estimators import NORMALISATIONS, WEIGHTINGS

REWARDS_PG = torch.tensor([[0.0, 1.0, 1.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
LENGTHS_PG = torch.tensor([[1.0, 4.0], [5.0, 10.0]])


def test_normalisations_by_hand():
    assert (NORMALISATIONS["none"](REWARDS_PG) == 1).all()
    group = NORMALISATIONS["group_std"](REWARDS_PG)
    assert group[0].tolist() == pytest.approx([(1 / 3) ** 0.5 + 1e-4] * 3)
    assert group[1].tolist() == pytest.approx([1e-4] * 3)  # equal rewards: no division by zero
    spread = (((11 / 6) ** 2 + 2 * (5 / 6) ** 2 + 3 * (7 / 6) ** 2) / 5) ** 0.5
    assert NORMALISATIONS["batch_std"](REWARDS_PG).flatten().tolist() == pytest.approx([spread + 1e-4] * 6)


def test_weightings_by_hand():
    expected = {
        "sequence": [1, 1, 1, 1],
        "sequence_mean": [1, 1 / 4, 1 / 5, 1 / 10],
        "token_mean": [1 / 5] * 4,
        "constant": [1 / 16] * 4,
    }
    assert set(WEIGHTINGS) == set(expected)
    for name, values in expected.items():
        assert WEIGHTINGS[name](LENGTHS_PG, 16).flatten().tolist() == pytest.approx(values)


@pytest.mark.parametrize(
    ("name", "rewards", "message"),
    [("group_std", [[1.0], [2.0]], "at least 2 outputs per prompt"), ("batch_std", [[1.0]], "at least 2 rewards")],
)
def test_too_few_rewards_for_a_standard_deviation(name, rewards, message):
    with pytest.raises(ValueError, match=message):
        NORMALISATIONS[name](torch.tensor(rewards))


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_outputs_that_do_not_count_do_not_enter_a_divisor(name):
    """As if they were not there; a group with one valid output has no spread."""
    rewards_PG = torch.tensor([[0.0, 1.0, math.nan], [2.0, 50.0, 5.0], [7.0, math.nan, math.nan]])
    valid_PG = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0]])
    got = NORMALISATIONS[name](rewards_PG, valid_PG)
    kept = [rewards_PG[p, valid_PG[p].bool()] for p in range(3)]
    expected = {
        "none": [1.0, 1.0, 1.0],
        "group_std": [kept[0].std() + 1e-4, kept[1].std() + 1e-4, 1e-4],
        "batch_std": [torch.cat(kept).std() + 1e-4] * 3,
    }[name]
    torch.testing.assert_close(got, torch.tensor(expected)[:, None].expand(3, 3))
    full = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(NORMALISATIONS[name](full, ones), NORMALISATIONS[name](full))


def test_a_token_mean_of_masked_outputs_weighs_every_valid_token_alike():
    """Factor / (P' G_i), the mean over prompts and valid outputs, is 1 / tokens for each."""
    valid_PG = torch.ones_like(LENGTHS_PG, dtype=torch.bool)
    valid_PG[0, 0] = False
    weight_PG = WEIGHTINGS["token_mean"](LENGTHS_PG, 16, valid_PG)
    of_mean_PG = weight_PG / len(LENGTHS_PG) / valid_PG.sum(1, keepdim=True)
    tokens = float(LENGTHS_PG[valid_PG].sum())
    assert of_mean_PG[valid_PG].tolist() == pytest.approx([1 / tokens] * int(valid_PG.sum()))
    everything = torch.ones_like(valid_PG)
    for name, weigh in WEIGHTINGS.items():
        torch.testing.assert_close(weigh(LENGTHS_PG, 16, everything), weigh(LENGTHS_PG, 16), msg=name)
