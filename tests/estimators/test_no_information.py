"""Batches whose rewards agree: what counts as such, what leaving them out costs, and how far others need to go."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from oblrpo.estimators import Prior, baseline, differ, headroom
from oblrpo.estimators.advantages import ROUNDING
from tests.estimators.bandits import bandit

P, G = 3, 4


def everywhere(value):
    return torch.full((P, G), value)


def but_one(value, other):
    rewards_PG = everywhere(value)
    rewards_PG[1, 2] = other
    return rewards_PG


@pytest.mark.parametrize("valid", ["all", "but a prompt", "one of each prompt"])
@pytest.mark.parametrize(
    ("rewards_PG", "expected"),
    [
        (everywhere(0.0), False),
        (everywhere(0.37), False),
        (everywhere(-1.0), False),
        (everywhere(1e30), False),
        (but_one(1.0, 0.0), True),
        (but_one(0.0, 1e-30), True),
        (but_one(0.37, 0.37 * (1 + 1e-7)), False),  # a sum in another order
        (but_one(-0.37, -0.37 * (1 + 1e-7)), False),
        (but_one(0.37, 0.37 * (1 + 1e-5)), True),
        (but_one(100.0, 100.001), True),
        (but_one(1e6, 1e6 + 1), True),  # which float32 tells apart
        (but_one(1e6, 1e6 + 0.125), False),  # by two of its steps there: equal sums may lie as far apart
        (0.37 - 0.001 * torch.arange(P * G).view(P, G), True),  # a constant with a length term
    ],
)
def test_rewards_that_differ(rewards_PG, expected, valid):
    """Those that count alone; others may be anything."""
    rewards_PG, valid_PG = rewards_PG.double(), torch.ones(P, G, dtype=torch.bool)
    if valid == "but a prompt":
        valid_PG[0] = False
    if valid == "one of each prompt":
        valid_PG[:, :2] = valid_PG[:, 3:] = False
    assert differ(rewards_PG.where(valid_PG, torch.tensor(math.nan).double()), valid_PG) is expected


def test_equal_sums_of_rounded_terms_do_not_differ():
    """Of four weighted terms of one sign: rounded to float32 once, or with each product and sum, in two orders."""
    generator, valid_PG = torch.Generator().manual_seed(0), torch.ones(1, 3, dtype=torch.bool)
    term_2NK = torch.rand(2, 100_000, 4, generator=generator, dtype=torch.float64)
    a_N, b_N, c_N, d_N = (term_2NK[0].float() * term_2NK[1].float()).unbind(1)
    once_N = term_2NK.prod(0).sum(1).float()
    sums_NG = torch.stack([once_N, a_N + b_N + c_N + d_N, d_N + c_N + b_N + a_N], 1)
    apart_N = (sums_NG.max(1).values - sums_NG.min(1).values) / sums_NG.max(1).values
    assert float(apart_N.max()) > ROUNDING * 0.75
    assert not any(differ(sums_G[None], valid_PG) for sums_G in sums_NG[apart_N > ROUNDING / 4])


def test_a_group_of_one_is_compared_with_other_prompts():
    one_P1 = torch.ones(P, 1, dtype=torch.bool)
    assert not differ(torch.full((P, 1), 0.5), one_P1)
    assert differ(torch.tensor([[0.5], [0.5], [0.0]]), one_P1)


def test_part_of_the_prompts_may_agree():
    """Every prompt with itself, even: prompts differ, and so the batch says something under a baseline of others."""
    assert differ(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool))
    assert differ(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool))


def test_what_does_not_count_does_not_differ():
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1, 2] = False
    assert not differ(but_one(1.0, 0.0), valid_PG)
    assert not differ(but_one(1.0, 0.0), torch.zeros(P, G, dtype=torch.bool))


@pytest.mark.parametrize("n", [2, 12, 128])
@pytest.mark.parametrize(("unit", "offset"), [(1.0, 0.0), (1e-3, 5.0), (100.0, -7.0)])
def test_the_headroom_of_one_that_fails_and_of_one_that_succeeds(n, unit, offset):
    """(1/n)^2 / (2 (n - 1)/n^2) = 1 / (2 (n - 1)), and (n - 1) / 2; the unit and zero of rewards do not matter."""
    valid_PG = torch.ones(1, n, dtype=torch.bool)
    fails_PG = torch.ones(1, n, dtype=torch.float64)
    fails_PG[0, 0] = 0
    for rewards_PG, expected in ((fails_PG, 1 / (2 * (n - 1))), (1 - fails_PG, (n - 1) / 2)):
        assert headroom(offset + unit * rewards_PG, valid_PG) == pytest.approx(expected, rel=1e-9)


def test_the_headroom_is_that_of_rewards_that_count():
    rewards_PG = torch.tensor([[0.0, 1.0, math.nan], [3.0, 100.0, 0.0]]).double()
    valid_PG = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    assert headroom(rewards_PG, valid_PG) == pytest.approx((3 - 1) ** 2 / (2 * 6 / 4))
    assert headroom(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)) == math.inf


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_nearer_than_the_headroom_earns_all(seed):
    """max F - mean F <= sd(F) sqrt(E[(pi'/pi - 1)^2]), exactly, for the policy that always earns the most."""
    random = torch.Generator().manual_seed(seed)
    pi_N = torch.rand(8, generator=random, dtype=torch.float64)
    pi_N, rewards_N = pi_N / pi_N.sum(), torch.rand(8, generator=random, dtype=torch.float64)
    mean, best = float(pi_N @ rewards_N), int(rewards_N.argmax())
    room = float(rewards_N[best] - mean) ** 2 / (2 * float(pi_N @ (rewards_N - mean).square()))
    chi2 = 1 / float(pi_N[best]) - 1
    assert room <= chi2 / 2 * (1 + 1e-12)


def rare(logit):
    """Two prompts that earn 1 with "11", whose tokens both have this logit, and else 0; and p, the chance of it."""
    generator = torch.Generator().manual_seed(1)  # of the bandit's features, as many as there are parameters
    feature_4D = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64).view(4, 4)
    policy = bandit(2, 3, seed=1, theta=torch.linalg.solve(feature_4D, torch.full((4,), logit, dtype=torch.float64)))
    policy = replace(policy, reward_PA=torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64))
    p = 1 / (1 + math.exp(-logit)) ** 2
    torch.testing.assert_close(policy.probability_PA[:, 2], torch.full((2,), p, dtype=torch.float64))
    return policy, p


def remembering(reward):
    """A prior behind which lie steps that earned this on average."""
    prior = Prior(8.0)
    prior.observe(torch.full((2, 4), reward, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64))
    prior.next_step()
    return prior


def listed(policy, name, **more):
    """E g over all batches of two outputs a prompt; and of those that agree on 0 and on 1 a Part of it."""
    whole_D, agreeing = torch.zeros(4).double(), {0.0: Part(), 1.0: Part()}
    for index_PG, probability in policy.batches(2):
        rewards_PG, inputs = policy.outputs(index_PG)
        b_PG = baseline(name, rewards_PG, **inputs, **more)
        part_D = (probability * policy.gradient(index_PG, rewards_PG - b_PG)).detach()
        whole_D += part_D
        if not differ(rewards_PG, torch.ones_like(rewards_PG, dtype=torch.bool)):
            part = agreeing[float(rewards_PG.max())]
            part.mean_D = part.mean_D + part_D
            part.chance += float(probability)
            part.advantage = max(part.advantage, float((rewards_PG - b_PG).abs().max()))
    torch.testing.assert_close(whole_D, policy.true_gradient())
    return whole_D, agreeing[0.0], agreeing[1.0]


@dataclass
class Part:
    """The part of E g that some batches have, their chance, and the largest |F - b| in any of them."""

    mean_D: torch.Tensor | float = 0.0
    chance: float = 0.0
    advantage: float = 0.0


@pytest.mark.parametrize("logit", [0.0, -1.0, -2.0, -4.0])
@pytest.mark.parametrize("remembered", ["what it earns", 0.5])
def test_leaving_agreeing_batches_out_takes_little_off_the_mean_gradient(logit, remembered):
    """E g is p s, s being the mean score of a success, and (p - 1) s that of failures: batches that all fail say
    P(all fail) b / (1 - p) of it, those that all succeed P(all succeed) (1 - b) / p. Where the baseline remembers what
    the policy earns, that is p where p is small; only a memory of far better rewards makes it more."""
    policy, p = rare(logit)
    whole_D, fail, succeed = listed(
        policy, "oblr_shrunk", prior=remembering(p if remembered == "what it earns" else remembered)
    )
    share = float((fail.mean_D + succeed.mean_D).norm() / whole_D.norm())
    assert 0 < share <= fail.chance * fail.advantage / (1 - p) + succeed.chance * succeed.advantage / p
    assert fail.chance == pytest.approx((1 - p) ** 4)
    if remembered == "what it earns":
        assert share < p


@pytest.mark.parametrize("logit", [0.0, -2.0])
def test_under_rloo_nothing_at_all_is_left_out(logit):
    _, fail, succeed = listed(rare(logit)[0], "rloo")
    for part in (fail, succeed):
        assert part.chance > 0
        assert not part.mean_D.any()
