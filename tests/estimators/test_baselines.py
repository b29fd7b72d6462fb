"""The formulas in plain Python, group by group of whatever size; and bad input."""

import dataclasses
import inspect
import itertools
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import pages
from oblrpo import estimators
from oblrpo.algorithms import resolve
from oblrpo.estimators import BASELINES, NORMALISATIONS, WEIGHTINGS, Prior, baseline, under_every_baseline
from oblrpo.estimators.baselines import FUNCTIONS
from oblrpo.settings import AlgorithmConfig, OptimConfig
from oblrpo.tables import algorithms

FULL_PG = torch.ones(4, 5, dtype=torch.bool)
MASKED_PG = torch.tensor(  # full, with gaps, two, one output
    [[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool
)
HISTORY = [([[1.0, 0.0, 2.0]], [[3.0, 1.0, 0.5]]), ([[0.0, 0.5, -1.0]], [[0.2, 4.0, 1.0]])]
"""Rewards and weights of two earlier steps."""
MEMORY, STRENGTH = 0.6, 3.0


class Output:
    """One valid output: its place in the group, reward, weight and length."""

    def __init__(self, place, reward, weight, length):
        self.place, self.reward, self.weight, self.length = place, reward, weight, length


def weighted(outputs, weight):
    """Sum w F / sum w, 0 of nothing."""
    total = sum(weight(o) for o in outputs)
    return sum(weight(o) * o.reward for o in outputs) / total if total else 0.0


def rest_of(group, own):
    return [o for o in group if o is not own]


def plain_js(groups, p, own):
    others = [group for q, group in enumerate(groups) if q != p and group]
    rest, n = rest_of(groups[p], own), len(others) + 1
    if not rest:
        return statistics.mean(weighted(group, lambda o: 1) for group in others) if others else 0.0
    mean = weighted(rest, lambda o: 1)
    if n < 3:
        return mean
    spread = [group for group in others if len(group) > 1]
    variance = [statistics.variance([o.reward for o in group]) for group in spread]
    v = statistics.mean(s / (len(group) - 1) for s, group in zip(variance, spread, strict=True))
    means = [weighted(group, lambda o: 1) for group in others]
    own_noise = statistics.mean(s / len(group) for s, group in zip(variance, spread, strict=True))
    s = max(statistics.variance(means) - own_noise, 0)
    share = (n - 1) / n * v / (v + s)
    return (1 - share) * mean + share * statistics.mean(means)


def plain_shrunk(groups, p, own):
    """With `HISTORY` discounted, and the strength given."""
    count = weight = weighted_reward = 0.0
    for age, (rewards, norm2) in enumerate(reversed(HISTORY), 1):
        for f, w in zip(rewards[0], norm2[0], strict=True):
            count += MEMORY**age
            weight += MEMORY**age * w
            weighted_reward += MEMORY**age * w * f
    for q, group in enumerate(groups):
        for o in group if q != p else []:
            count += 1
            weight += o.weight
            weighted_reward += o.weight * o.reward
    pull, rest = STRENGTH * weight / count, rest_of(groups[p], own)
    top = sum(o.weight * o.reward for o in rest) + pull * weighted_reward / weight
    return top / (sum(o.weight for o in rest) + pull)


def plain_lazy(groups, p, own):
    rewards = {o.reward for o in rest_of(groups[p], own)}
    return rewards.pop() if len(rewards) == 1 else plain_shrunk(groups, p, own)


FORMULAS = {
    "none": lambda groups, p, own: 0.0,
    "mean": lambda groups, p, own: weighted(groups[p], lambda o: 1),
    "grpo": lambda groups, p, own: weighted(groups[p], lambda o: 1),
    "dr_grpo": lambda groups, p, own: weighted(groups[p], lambda o: 1),
    "reinforce_pp": lambda groups, p, own: weighted([o for group in groups for o in group], lambda o: 1),
    "rloo": lambda groups, p, own: weighted(rest_of(groups[p], own), lambda o: 1),
    "js": plain_js,
    "oblr": lambda groups, p, own: weighted(rest_of(groups[p], own), lambda o: o.weight),
    "oblr_shrunk": plain_shrunk,
    "oblr_lazy": plain_lazy,
    "oblr_thrifty": plain_lazy,
    "opo": lambda groups, p, own: weighted(groups[p], lambda o: o.length),
    "eob": lambda groups, p, own: weighted(groups[p], lambda o: o.weight),
    "vcpo": lambda groups, p, own: weighted(groups[p], lambda o: o.weight),
}


def random_inputs(prompts=4, outputs=5, dtype=torch.float64):
    torch.manual_seed(1)
    return {
        "rewards_PG": torch.randn(prompts, outputs, dtype=dtype),
        "norm2_PG": torch.rand(prompts, outputs, dtype=dtype) * 10 + 0.01,
        "length_PG": torch.randint(1, 9, (prompts, outputs)),
    }


def with_history():
    prior = Prior(STRENGTH, MEMORY)
    for rewards, norm2 in HISTORY:
        prior.observe(torch.tensor(rewards).double(), torch.tensor(norm2, dtype=torch.float64))
        prior.next_step()
    return prior


def by_hand(name, inputs, valid_PG):
    numbers = [inputs[key].tolist() for key in ("rewards_PG", "norm2_PG", "length_PG")]
    groups = [
        [Output(j, *(each[p][j] for each in numbers)) for j in range(valid_PG.shape[1]) if valid_PG[p, j]]
        for p in range(valid_PG.shape[0])
    ]
    return {(p, own.place): FORMULAS[name](groups, p, own) for p, group in enumerate(groups) for own in group}


def test_every_baseline_has_a_formula_in_plain_python():
    """A new one needs its formula in `FORMULAS`, or a test of its own as `otb` has, which is token by token."""
    assert set(BASELINES) - set(FORMULAS) == {"otb"}


@pytest.mark.parametrize("prompts", [1, 2, 4])
@pytest.mark.parametrize("valid_PG", [FULL_PG, MASKED_PG], ids=["full", "masked"])
@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_in_plain_python(name, valid_PG, prompts):
    """With gaps, groups of two and of one."""
    valid_PG, inputs = valid_PG[-prompts:], random_inputs(prompts)
    got = estimators.baseline(name, **inputs, valid_PG=valid_PG, prior=with_history())
    for (p, j), expected in by_hand(name, inputs, valid_PG).items():
        assert got[p, j].item() == pytest.approx(expected, rel=1e-12, abs=1e-12), (p, j)


@pytest.mark.parametrize("name", [name for name, entry in BASELINES.items() if entry.off_policy])
def test_every_off_policy_formula_has_weights_rho2_w(name):
    inputs = random_inputs()
    rho_PG = torch.rand(4, 5, dtype=torch.float64) + 0.5
    weighted_inputs = inputs | {"norm2_PG": inputs["norm2_PG"] * rho_PG**2}
    got = estimators.baseline(name, **inputs, rho_PG=rho_PG, prior=with_history())
    for (p, j), expected in by_hand(name, weighted_inputs, FULL_PG).items():
        assert got[p, j].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_otb_token_by_token_in_plain_python(masked):
    """Weights summed up to each token, over outputs that reach it; outputs of lengths 1 to 6."""
    torch.manual_seed(2)
    P, G, T = 3, 4, 6
    rewards_PG, norm2_PGT = torch.randn(P, G), torch.rand(P, G, T)
    length_PG = torch.tensor([[1, 4, 6, 2], [3, 3, 3, 3], [2, 5, 1, 5]])
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    if masked:
        valid_PG[0, 2] = valid_PG[2, 1] = False
    token_mask_PGT = (torch.arange(T) < length_PG[..., None]).float()
    got = estimators.baseline(
        "otb", rewards_PG, valid_PG=valid_PG, logit_norm2_PGT=norm2_PGT, token_mask_PGT=token_mask_PGT
    )
    assert got.shape == (P, G, T)
    for p, j, t in itertools.product(range(P), range(G), range(T)):
        reach = [i for i in range(G) if length_PG[p, i] > t and valid_PG[p, i]]
        weights = [sum(norm2_PGT[p, i, : t + 1].tolist()) for i in reach]
        if valid_PG[p, j] and j in reach:
            expected = sum(w * rewards_PG[p, i].item() for w, i in zip(weights, reach, strict=True)) / sum(weights)
            assert got[p, j, t].item() == pytest.approx(expected, rel=1e-5)
        if valid_PG[p, j] and reach == [j]:  # the lone longest output
            assert rewards_PG[p, j] - got[p, j, t] == 0


def test_rloo_mean_and_none_by_hand():
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 3.0]])
    torch.testing.assert_close(estimators.baseline("rloo", rewards_PG), torch.tensor([[1.0, 4 / 3, 4 / 3, 1 / 3]]))
    assert estimators.baseline("mean", rewards_PG).tolist() == [[1.0] * 4]
    assert estimators.baseline("none", rewards_PG).tolist() == [[0.0] * 4]


def test_js_by_hand():
    """For the first prompt: v = 2, s = 8 - 1 of the means 3 and 7, l = 2/3 2/9, towards their mean 5."""
    rewards_PG = torch.tensor([[0.0, 1.0], [2.0, 4.0], [6.0, 8.0]], dtype=torch.float64)
    got = estimators.baseline("js", rewards_PG)[0]
    share = 2 / 3 * 2 / 9
    assert got.tolist() == pytest.approx([(1 - share) * 1 + share * 5, share * 5], rel=1e-14)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 100)), min_size=2, max_size=9))
@settings(max_examples=200, deadline=None)
def test_leverage_identity(pairs):
    """F_j - b_j = (F_j - b) / (1 - h_j), the form in which the baseline is published."""
    rewards, norm2 = torch.tensor(pairs, dtype=torch.float64).T
    full, leverage = (norm2 * rewards).sum() / norm2.sum(), norm2 / norm2.sum()
    got = rewards - estimators.baseline("oblr", rewards[None], norm2_PG=norm2[None])[0]
    torch.testing.assert_close(got, (rewards - full) / (1 - leverage), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", BASELINES)
def test_a_shift_and_a_scale_of_rewards_pass_through(name):
    """b(a F + c) = a b(F) + c: advantages do not see the shift; `none` apart."""
    inputs = random_inputs() | {"token_mask_PGT": torch.ones(4, 5, 2), "logit_norm2_PGT": torch.rand(4, 5, 2)}
    rewards_PG = inputs.pop("rewards_PG")
    plain = estimators.baseline(name, rewards_PG, **inputs)
    moved = estimators.baseline(name, 3 * rewards_PG + 2, **inputs)
    expected = plain if name == "none" else 3 * plain + 2
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BASELINES)
def test_it_is_computed_in_float64_and_returned_in_the_type_of_the_rewards(name):
    inputs = random_inputs(dtype=torch.float32) | {
        "token_mask_PGT": torch.ones(4, 5, 2, dtype=torch.bool), "logit_norm2_PGT": torch.rand(4, 5, 2)
    }  # fmt: skip
    got = estimators.baseline(name, **inputs)
    assert got.dtype == torch.float32
    double = estimators.baseline(name, **{key: value.double() for key, value in inputs.items()})
    assert torch.equal(got, double.float())
    whole = inputs | {"rewards_PG": torch.randint(2, (4, 5))}
    assert estimators.baseline(name, **whole).dtype == torch.float32


def test_equal_weights_are_rloo():
    rewards_PG = torch.randn(4, 6)
    got = estimators.baseline("oblr", rewards_PG, norm2_PG=torch.full((4, 6), 3.7))
    torch.testing.assert_close(got, estimators.baseline("rloo", rewards_PG))


def test_no_strength_is_oblr_and_an_infinite_one_the_others():
    inputs = random_inputs()
    none = estimators.baseline("oblr_shrunk", **inputs, prior=Prior(0.0))
    torch.testing.assert_close(none, estimators.baseline("oblr", **inputs), rtol=1e-14, atol=0)
    far = estimators.baseline("oblr_shrunk", **inputs, prior=Prior(1e12))
    _, others_P1 = Prior(1e12).of_others(inputs["rewards_PG"], FULL_PG.double(), inputs["norm2_PG"])
    torch.testing.assert_close(far, others_P1.expand(4, 5), rtol=1e-9, atol=1e-9)


def test_the_default_prior_has_strength_eight_and_this_batch_only():
    inputs = random_inputs()
    got = estimators.baseline("oblr_shrunk", **inputs)
    torch.testing.assert_close(got, estimators.baseline("oblr_shrunk", **inputs, prior=Prior(8.0)), rtol=0, atol=0)


TWO = [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "rewards", "inputs", "message"),
    [
        ("oblrr", TWO, {}, "unknown baseline 'oblrr'; choose one of: none, mean, rloo, grpo"),
        ("oblr", TWO, {}, "'oblr' needs norm2_PG"),
        ("oblr_shrunk", TWO, {}, r"'oblr_shrunk' needs norm2_PG\."),
        ("opo", TWO, {}, "'opo' needs length_PG"),
        ("otb", TWO, {"token_mask_PGT": [[[1.0], [1.0]]]}, r"'otb' needs logit_norm2_PGT\."),
        ("otb", TWO, {}, "'otb' needs logit_norm2_PGT, token_mask_PGT"),
        ("rloo", TWO, {"norm_PG": [[1.0, 1.0]]}, "no baseline takes norm_PG; inputs are: length_PG, logit_norm2_PGT"),
        ("rloo", [[1.0]], {}, "'rloo' needs at least 2 outputs per prompt, got 1"),
        ("grpo", [[1.0]], {}, "at least 2 outputs"),
        ("oblr", [[1.0]], {"norm2_PG": [[1.0]]}, "at least 2 outputs"),
        ("rloo", [0.0, 1.0], {}, r"rewards_PG must have shape \(prompts, outputs per prompt\), got \(2,\)"),
        ("rloo", [[0.0, float("nan")]], {}, "rewards_PG holds NaN or infinity"),
        ("oblr", TWO, {"norm2_PG": [[1.0, float("inf")]]}, "norm2_PG holds NaN or infinity"),
        ("oblr", TWO, {"norm2_PG": [[1.0, -1.0]]}, "norm2_PG holds a negative squared norm"),
        ("opo", TWO, {"length_PG": [[1.0, -1.0]]}, "length_PG holds a negative number"),
        ("oblr", TWO, {"norm2_PG": [[1.0, 1.0, 1.0]]}, r"norm2_PG has shape \(1, 3\), rewards_PG \(1, 2\)"),
        ("oblr", TWO, {"norm2_PG": [[1.0, 1.0]], "rho_PG": [[1.0]]}, "rho_PG has shape"),
        ("oblr", TWO, {"norm2_PG": [[1.0, 1.0]], "rho_PG": [[1.0, float("inf")]]}, "rho_PG holds NaN or infinity"),
        ("otb", TWO, {"token_mask_PGT": TWO, "logit_norm2_PGT": [[[1.0], [1.0]]]}, "token_mask_PGT has shape"),
        ("rloo", TWO, {"valid_PG": [[True]]}, r"valid_PG has shape \(1, 1\)"),
        ("reinforce_pp", [*TWO, *TWO], {"valid_PG": [[True, True]]}, r"valid_PG has shape \(1, 2\)"),
    ],
)
def test_bad_input_is_named(name, rewards, inputs, message):
    with pytest.raises(ValueError, match=message):
        estimators.baseline(name, torch.tensor(rewards), **{k: torch.tensor(v) for k, v in inputs.items()})


def test_inputs_that_others_need_may_be_there():
    inputs = random_inputs()
    assert torch.equal(estimators.baseline("rloo", **inputs), estimators.baseline("rloo", inputs["rewards_PG"]))


def test_every_row_has_a_function_that_takes_what_it_needs():
    assert list(FUNCTIONS) == list(BASELINES)
    for name, row in BASELINES.items():
        assert tuple(inspect.signature(FUNCTIONS[name]).parameters) == ("rewards_PG", "valid_PG", *row.needs), name
        assert row.normalisation in NORMALISATIONS
        assert row.meaning.endswith(".")
    assert (list(NORMALISATIONS), tuple(WEIGHTINGS)) == (list(algorithms.SMALLEST_GROUPS), algorithms.WEIGHTING_NAMES)


def test_a_new_baseline_is_a_row_and_a_function(monkeypatch):
    """Settings, ledger and pages know it from then on."""
    row = dataclasses.replace(BASELINES["rloo"], meaning="Twice that of RLOO.", normalisation="batch_std")
    monkeypatch.setitem(BASELINES, "twice", row)
    monkeypatch.setitem(FUNCTIONS, "twice", lambda rewards_PG, valid_PG: 2 * FUNCTIONS["rloo"](rewards_PG, valid_PG))
    rewards_PG = torch.tensor([[1.0, 0.0, 0.5]])
    assert resolve(AlgorithmConfig(baseline="twice"), OptimConfig()).normalisation == "batch_std"
    torch.testing.assert_close(
        under_every_baseline(rewards_PG, {})["twice"][0], rewards_PG - 2 * baseline("rloo", rewards_PG)
    )
    assert "| `twice` | Twice that of RLOO. | yes |" in pages.baselines()
