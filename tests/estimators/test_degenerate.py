"""Groups of one or of none, masked outputs, weights of zero and of 1e30: defined, and no digit lost."""

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, Prior

T = 3
NAN = float("nan")
SHRUNK = ("oblr_shrunk", "oblr_lazy", "oblr_thrifty")
OF_ONE_GROUP = [name for name in BASELINES if name not in {"js", *SHRUNK, "reinforce_pp"}]


def random_inputs(prompts=3, outputs=4):
    torch.manual_seed(3)
    return {
        "rewards_PG": torch.randn(prompts, outputs, dtype=torch.float64),
        "norm2_PG": torch.rand(prompts, outputs, dtype=torch.float64),
        "length_PG": torch.randint(1, 4, (prompts, outputs)).double(),
        "logit_norm2_PGT": torch.rand(prompts, outputs, T, dtype=torch.float64),
        "token_mask_PGT": torch.ones(prompts, outputs, T, dtype=torch.float64),
        "rho_PG": torch.rand(prompts, outputs, dtype=torch.float64) + 0.5,
    }


def advantages(name, rewards_PG, **inputs):
    baseline = estimators.baseline(name, rewards_PG, **inputs)
    return (rewards_PG if baseline.ndim == 2 else rewards_PG[..., None]) - baseline


def rows(inputs, prompts, outputs=slice(None)):
    return {key: value[prompts, outputs] for key, value in inputs.items()}


@pytest.mark.parametrize("name", BASELINES)
def test_equal_rewards_in_a_group_and_everywhere(name):
    """Zero variance: no advantage where the reward is that of all others, and nothing is divided by it."""
    inputs = random_inputs() | {"rewards_PG": torch.ones(3, 4, dtype=torch.float64)}
    found = advantages(name, **inputs)
    assert torch.allclose(found, torch.ones(()).double() if name == "none" else torch.zeros(()).double(), atol=1e-14)
    inputs["rewards_PG"] = torch.tensor([[1.0] * 4, [0.0] * 4, [0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    found = advantages(name, **inputs)
    assert found.isfinite().all()
    if not BASELINES[name].learns_from_ties:
        assert found[:2].abs().max() < 1e-14


@pytest.mark.parametrize("name", BASELINES)
def test_all_weights_zero_is_the_limit_of_equal_weights(name):
    """RLOO's for leave-one-out, the mean of the group for in-sample, of the other fold for cross-fitting."""
    inputs = random_inputs()
    zero = {key: torch.zeros_like(inputs[key]) for key in ("norm2_PG", "length_PG", "logit_norm2_PGT")}
    one = {key: torch.ones_like(value) for key, value in zero.items()}
    got = estimators.baseline(name, **inputs | zero)
    expected = estimators.baseline("rloo" if name in SHRUNK else name, **inputs | one | {"rho_PG": None})
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_all_other_norms_zero_gives_rloo():
    got = estimators.baseline("oblr", torch.tensor([[1.0, 0.0, 0.5]]), norm2_PG=torch.tensor([[2.0, 0.0, 0.0]]))
    assert got.tolist() == [[0.25, 1.0, 1.0]]


def test_where_all_other_prompts_weigh_nothing_there_is_no_shrinking():
    inputs = rows(random_inputs(), slice(2))
    inputs["norm2_PG"][1] = 0
    plain, shrunk = (estimators.baseline(name, **inputs) for name in ("oblr", "oblr_shrunk"))
    torch.testing.assert_close(shrunk[0], plain[0], rtol=1e-14, atol=0)
    weights, rewards = inputs["norm2_PG"][0] * inputs["rho_PG"][0] ** 2, inputs["rewards_PG"][0]
    torch.testing.assert_close(shrunk[1], ((weights * rewards).sum() / weights.sum()).expand(4))


def test_one_enormous_norm_loses_no_digits():
    rewards_PG = torch.tensor([[1.0, 0.25, 0.75]], dtype=torch.float64)
    norm2_PG = torch.tensor([[1e30, 1.0, 3.0]], dtype=torch.float64)
    got = estimators.baseline("oblr", rewards_PG, norm2_PG=norm2_PG)
    assert got[0, 0].item() == pytest.approx(0.625, rel=1e-15)
    assert got[0, 1:].tolist() == pytest.approx([1.0, 1.0], rel=1e-15)
    assert estimators.baseline("eob", rewards_PG, norm2_PG=norm2_PG)[0].tolist() == pytest.approx([1.0] * 3, rel=1e-15)


def test_one_enormous_norm_leaves_its_prompts_own_prior_alone():
    """Summed from the other prompts, never by subtraction from the total."""
    rewards_PG = torch.tensor([[1.0, 0.25], [0.5, 0.0], [0.0, 2.0]], dtype=torch.float64)
    norm2_PG = torch.tensor([[1e30, 1.0], [1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    got = estimators.baseline("oblr_shrunk", rewards_PG, norm2_PG=norm2_PG, prior=Prior(2.0))
    pull, prior = 2 * 8 / 4, (0.5 + 2 * 2.0) / 8
    assert got[0, 0].item() == pytest.approx((0.25 + pull * prior) / (1 + pull), rel=1e-14)


@pytest.mark.parametrize("name", ["none", "reinforce_pp", "js", *SHRUNK])
def test_a_group_of_one_is_defined_without_leave_one_out(name):
    inputs = rows(random_inputs(4, 1), slice(None))
    rewards_P, weights_P = inputs["rewards_PG"][:, 0], (inputs["norm2_PG"] * inputs["rho_PG"] ** 2)[:, 0]
    got = estimators.baseline(name, **inputs)[:, 0]
    others = [[q for q in range(4) if q != p] for p in range(4)]
    expected = {
        "none": torch.zeros(4).double(),
        "reinforce_pp": rewards_P.mean().expand(4),
        "js": torch.stack([rewards_P[q].mean() for q in others]),
        "shrunk": torch.stack([(weights_P[q] * rewards_P[q]).sum() / weights_P[q].sum() for q in others]),
    }
    torch.testing.assert_close(got, expected["shrunk" if name in SHRUNK else name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"none", "reinforce_pp", "js", *SHRUNK}))
def test_a_group_of_one_is_refused_where_outputs_of_a_prompt_are_compared(name):
    """Their advantage would be 0 whatever the reward."""
    with pytest.raises(ValueError, match="at least 2 outputs per prompt"):
        estimators.baseline(name, **rows(random_inputs(4, 1), slice(None)))


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_a_lone_output_is_shrunk_all_the_way_whatever_the_strength(strength):
    got = estimators.baseline(
        "oblr_shrunk",
        torch.tensor([[5.0], [1.0], [3.0]]),
        norm2_PG=torch.tensor([[1.0], [1.0], [3.0]]),
        prior=Prior(strength),
    )
    assert got[0, 0].item() == pytest.approx(2.5)


@pytest.mark.parametrize("name", ["js", *SHRUNK])
def test_a_single_output_in_all_has_nothing_to_compare_with(name):
    assert estimators.baseline(name, torch.tensor([[5.0]]), norm2_PG=torch.tensor([[1.0]])).tolist() == [[0.0]]


@pytest.mark.parametrize("name", OF_ONE_GROUP)
def test_groups_of_mixed_sizes_are_as_each_alone(name):
    """Padding behind the outputs of a smaller group, with any numbers in it."""
    inputs = random_inputs()
    sizes = [4, 2, 3]
    valid_PG = torch.arange(4) < torch.tensor(sizes)[:, None]
    got = estimators.baseline(name, **inputs, valid_PG=valid_PG)
    for p, size in enumerate(sizes):
        alone = estimators.baseline(name, **rows(inputs, slice(p, p + 1), slice(size)))
        torch.testing.assert_close(got[p : p + 1, :size], alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize("poison", [NAN, float("inf"), -1e30])
@pytest.mark.parametrize("name", BASELINES)
def test_masked_outputs_are_ignored_whatever_their_numbers(name, poison):
    inputs = random_inputs()
    valid_PG = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]])
    clean = estimators.baseline(name, **inputs, valid_PG=valid_PG)
    for key in inputs:
        inputs[key][valid_PG == 0] = poison
    got = estimators.baseline(name, **inputs, valid_PG=valid_PG)
    torch.testing.assert_close(got[valid_PG == 1], clean[valid_PG == 1], rtol=0, atol=0)


@pytest.mark.parametrize("name", BASELINES)
def test_masked_outputs_have_no_advantage(name):
    inputs = random_inputs()
    valid_PG = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    assert (advantages(name, **inputs, valid_PG=valid_PG)[valid_PG == 0] == 0).all()


@pytest.mark.parametrize("name", BASELINES)
def test_a_prompt_without_a_valid_output_counts_for_nothing(name):
    """The others' baselines are those of the batch without it."""
    inputs = random_inputs(5)
    valid_PG = torch.ones(5, 4)
    valid_PG[1] = 0
    rest = [0, 2, 3, 4]
    got = estimators.baseline(name, **inputs, valid_PG=valid_PG)
    torch.testing.assert_close(got[rest], estimators.baseline(name, **rows(inputs, rest)), rtol=1e-13, atol=1e-13)
    assert got.isfinite().all()


@pytest.mark.parametrize("name", BASELINES)
def test_a_batch_without_a_valid_output(name):
    inputs = random_inputs()
    assert (advantages(name, **inputs, valid_PG=torch.zeros(3, 4)) == 0).all()


@pytest.mark.parametrize("name", BASELINES)
def test_a_prompt_with_one_valid_output(name):
    """0 from its own group where it is left out, its own reward where it is not, else what other prompts say."""
    inputs = random_inputs()
    valid_PG = torch.ones(3, 4)
    valid_PG[0] = torch.tensor([0, 0, 1, 0])
    got = estimators.baseline(name, **inputs, valid_PG=valid_PG)[0, 2]
    rewards_PG = inputs["rewards_PG"]
    weights_PG = inputs["norm2_PG"] * inputs["rho_PG"] ** 2
    expected = {
        "none": 0.0,
        "rloo": 0.0,
        "oblr": 0.0,
        "js": rewards_PG[1:].mean(1).mean(),
        **dict.fromkeys(SHRUNK, (weights_PG * rewards_PG)[1:].sum() / weights_PG[1:].sum()),
        "reinforce_pp": (rewards_PG[1:].sum() + rewards_PG[0, 2]) / 9,
    }
    wanted = torch.as_tensor(expected.get(name, rewards_PG[0, 2]), dtype=torch.float64)
    torch.testing.assert_close(got, wanted.expand_as(got), rtol=1e-13, atol=1e-14)


def test_a_js_batch_without_any_spread_keeps_the_groups_own_means():
    """V = 0 and s = 0: no noise to shrink away."""
    rewards_PG = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    assert estimators.baseline("js", rewards_PG)[0].tolist() == [1.0, 0.0]
