import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oblrpo import estimators
from oblrpo.estimators import BASELINES


def brute_force_oblr(rewards, norm2):
    """The formula, output by output, in plain Python."""
    result = []
    for j in range(len(rewards)):
        others = [i for i in range(len(rewards)) if i != j]
        total = sum(norm2[i] for i in others)
        result.append(sum(norm2[i] * rewards[i] for i in others) / total)
    return result


def test_oblr_is_the_weighted_mean_of_the_others():
    rewards = [[1.0, 0.0, 2.0, -1.0], [0.5, 0.5, 3.0, 0.0]]
    norm2 = [[1.0, 2.0, 3.0, 4.0], [10.0, 0.1, 0.3, 7.0]]
    got = estimators.baseline("oblr", torch.tensor(rewards), norm2_PG=torch.tensor(norm2))
    expected = [brute_force_oblr(f, w) for f, w in zip(rewards, norm2, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_rloo_mean_and_none_by_hand():
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 3.0]])
    torch.testing.assert_close(estimators.baseline("rloo", rewards_PG), torch.tensor([[1.0, 4 / 3, 4 / 3, 1 / 3]]))
    assert estimators.baseline("mean", rewards_PG).tolist() == [[1.0] * 4]
    assert estimators.baseline("none", rewards_PG).tolist() == [[0.0] * 4]


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 100)), min_size=2, max_size=9),
)
@settings(max_examples=200, deadline=None)
def test_leverage_identity(pairs):
    """F_j - b_j = (F_j - b) / (1 - h_j), the form in which the baseline is published."""
    rewards, norm2 = torch.tensor(pairs, dtype=torch.float64).T
    full, leverage = (norm2 * rewards).sum() / norm2.sum(), norm2 / norm2.sum()
    got = rewards - estimators.baseline("oblr", rewards[None], norm2_PG=norm2[None])[0]
    torch.testing.assert_close(got, (rewards - full) / (1 - leverage), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [name for name, entry in BASELINES.items() if entry.unbiased])
def test_an_unbiased_baseline_ignores_its_own_output(name):
    """Assumption 1: the same other outputs, the same baseline, whatever this output's reward and norm are."""
    torch.manual_seed(0)
    rewards_PG, norm2_PG = torch.rand(3, 5), torch.rand(3, 5)
    before = estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG)
    rewards_PG[:, 2], norm2_PG[:, 2] = 7.0, 50.0
    after = estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG)
    torch.testing.assert_close(after[:, 2], before[:, 2], rtol=0, atol=0)
    if name != "none":
        assert (after != before).any(1).all()  # the others' baselines see the change


def test_the_mean_baseline_depends_on_its_own_output():
    rewards_PG = torch.tensor([[0.0, 1.0]])
    assert (
        estimators.baseline("mean", rewards_PG)[0, 0]
        != estimators.baseline("mean", rewards_PG + torch.tensor([[5.0, 0.0]]))[0, 0]
    )
    assert not BASELINES["mean"].unbiased


def softmax_bandit_gradients(name, logits, rewards, G):
    """E[g] over all |A|^G draws of a softmax bandit, and grad J: exact enumeration in float64."""
    probability = logits.softmax(0)
    scores = torch.eye(len(logits), dtype=torch.float64) - probability
    norm2 = scores.square().sum(1)
    true = (probability[:, None] * rewards[:, None] * scores).sum(0)
    mean = torch.zeros_like(true)
    for draw in itertools.product(range(len(logits)), repeat=G):
        index = torch.tensor(draw)
        baseline = estimators.baseline(name, rewards[index][None], norm2_PG=norm2[index][None])[0]
        mean += probability[index].prod() * ((rewards[index] - baseline)[:, None] * scores[index]).mean(0)
    return mean, true


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("G", [2, 3, 4])
def test_bias_is_as_claimed_by_exact_enumeration(name, G):
    torch.manual_seed(G)
    logits, rewards = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    mean, true = softmax_bandit_gradients(name, logits, rewards, G)
    assert torch.allclose(mean, true, rtol=0, atol=1e-12) == BASELINES[name].unbiased
    if name == "mean":  # biased in scale only
        torch.testing.assert_close(mean, true * (G - 1) / G, rtol=0, atol=1e-12)


def test_one_enormous_norm_loses_no_digits():
    rewards_PG = torch.tensor([[1.0, 0.25, 0.75]], dtype=torch.float64)
    norm2_PG = torch.tensor([[1e30, 1.0, 3.0]], dtype=torch.float64)
    got = estimators.baseline("oblr", rewards_PG, norm2_PG=norm2_PG)
    assert got[0, 0].item() == pytest.approx(0.625, rel=1e-15)
    assert got[0, 1:].tolist() == pytest.approx([1.0, 1.0], rel=1e-15)


def test_all_other_norms_zero_gives_rloo():
    rewards_PG = torch.tensor([[1.0, 0.0, 0.5]])
    got = estimators.baseline("oblr", rewards_PG, norm2_PG=torch.tensor([[2.0, 0.0, 0.0]]))
    assert got.tolist() == [[0.25, 1.0, 1.0]]
    zero = estimators.baseline("oblr", rewards_PG, norm2_PG=torch.zeros(1, 3))
    torch.testing.assert_close(zero, estimators.baseline("rloo", rewards_PG))


def test_equal_weights_are_rloo_and_dtype_is_kept():
    rewards_PG = torch.randn(4, 6)
    got = estimators.baseline("oblr", rewards_PG, norm2_PG=torch.full((4, 6), 3.7))
    torch.testing.assert_close(got, estimators.baseline("rloo", rewards_PG))
    assert got.dtype == rewards_PG.dtype


@pytest.mark.parametrize(
    ("name", "rewards", "inputs", "message"),
    [
        ("oblrr", [[0.0, 1.0]], {}, "choose one of: none, mean, rloo, oblr"),
        ("oblr", [[0.0, 1.0]], {}, "needs norm2_PG"),
        ("rloo", [[0.0, 1.0]], {"norm_PG": [[1.0, 1.0]]}, "no baseline takes norm_PG; inputs are: norm2_PG"),
        ("rloo", [[1.0]], {}, "at least 2 outputs"),
        ("oblr", [[1.0]], {"norm2_PG": [[1.0]]}, "at least 2 outputs"),
        ("rloo", [0.0, 1.0], {}, "shape"),
        ("rloo", [[0.0, float("nan")]], {}, "NaN"),
        ("oblr", [[0.0, 1.0]], {"norm2_PG": [[1.0, float("inf")]]}, "norm2_PG holds NaN or infinity"),
        ("oblr", [[0.0, 1.0]], {"norm2_PG": [[1.0, -1.0]]}, "negative"),
        ("oblr", [[0.0, 1.0]], {"norm2_PG": [[1.0, 1.0, 1.0]]}, "shape"),
    ],
)
def test_bad_input_is_named(name, rewards, inputs, message):
    with pytest.raises(ValueError, match=message):
        estimators.baseline(name, torch.tensor(rewards), **{k: torch.tensor(v) for k, v in inputs.items()})


def test_a_group_of_one_is_defined_without_leave_one_out():
    assert estimators.baseline("mean", torch.tensor([[2.0], [3.0]])).tolist() == [[2.0], [3.0]]
    assert estimators.baseline("none", torch.tensor([[2.0], [3.0]])).tolist() == [[0.0], [0.0]]
