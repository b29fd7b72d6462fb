"""Every claim of `BASELINES` about bias: by changing an output and by listing every batch of a small policy."""

import copy

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, Prior
from oblrpo.estimators.baselines import TIES
from oblrpo.tables.baselines import UNBIASED
from tests.estimators.bandits import OTHER_THETA, THETA, bandit

BIASED = [name for name in BASELINES if name not in UNBIASED]
FULL_PG = torch.ones(4, 4, dtype=torch.bool)
MASKED_PG = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)


def remembering(strength=None):
    """A prior with two steps behind it, one of which chose its strength."""
    generator = torch.Generator().manual_seed(5)
    prior = Prior(strength)
    for _ in range(2):
        rewards_PG, norm2_PG = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
        prior.observe(rewards_PG, norm2_PG)
        prior.next_step()
    return prior


def random_inputs():
    torch.manual_seed(0)
    length_PG = torch.randint(1, 4, (4, 4))
    return {
        "rewards_PG": torch.rand(4, 4, dtype=torch.float64),
        "norm2_PG": torch.rand(4, 4, dtype=torch.float64),
        "length_PG": length_PG.double(),
        "logit_norm2_PGT": torch.rand(4, 4, 3, dtype=torch.float64),
        "token_mask_PGT": (torch.arange(3) < length_PG[..., None]).double(),
    }


def changed(inputs, p, j):
    """Another reward and other weights for one output."""
    inputs = {key: value.clone() for key, value in inputs.items()}
    inputs["rewards_PG"][p, j] = 7.0
    inputs["norm2_PG"][p, j] = 50.0
    inputs["length_PG"][p, j] = 3.0
    inputs["logit_norm2_PGT"][p, j] *= 9
    inputs["token_mask_PGT"][p, j] = 1.0
    return inputs


def changes(name, valid_PG, off_policy):
    """For every valid output: whether changing it changes its own baseline, and any other."""
    inputs, prior = random_inputs(), remembering()
    rho_PG = torch.rand(4, 4, dtype=torch.float64) + 0.5
    for p, j in valid_PG.nonzero().tolist():
        settings = {"valid_PG": valid_PG, "prior": prior}
        before = estimators.baseline(name, **inputs, **settings, rho_PG=rho_PG if off_policy else None)
        other_rho_PG = rho_PG.clone()
        other_rho_PG[p, j] = 3.0
        after = estimators.baseline(
            name, **changed(inputs, p, j), **settings, rho_PG=other_rho_PG if off_policy else None
        )
        differs = (before != after) & valid_PG.view(*valid_PG.shape, *[1] * (before.ndim - 2))
        own = bool(differs[p, j].any())
        differs[p, j] = False
        yield own, bool(differs.any())


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("valid_PG", [FULL_PG, MASKED_PG], ids=["full", "masked"])
@pytest.mark.parametrize("name", UNBIASED)
def test_an_unbiased_baseline_ignores_its_own_output(name, valid_PG, off_policy):
    """Assumption 1, bit by bit: the same other outputs, the same baseline, whatever this one's reward and weight."""
    found = list(changes(name, valid_PG, off_policy))
    assert not any(own for own, _ in found)
    assert any(others for _, others in found) == (name != "none")


@pytest.mark.parametrize("valid_PG", [FULL_PG, MASKED_PG], ids=["full", "masked"])
@pytest.mark.parametrize("name", BIASED)
def test_a_biased_baseline_sees_its_own_output(name, valid_PG):
    assert all(own for own, _ in changes(name, valid_PG, off_policy=False))


@pytest.mark.parametrize("name", BASELINES)
def test_the_check_for_users_says_the_same(name):
    assert estimators.depends_on_own_output(name) == (not BASELINES[name].unbiased)


def test_the_table_claims_what_its_authors_do():
    assert UNBIASED == ("none", "rloo", "js", "oblr", "oblr_shrunk", "oblr_lazy", "oblr_thrifty")
    biased = ["mean", "grpo", "dr_grpo", "reinforce_pp", "opo", "otb", "eob", "vcpo"]
    assert biased == BIASED


def mean_gradient(name, policy, G, prior=None, sampler=None, reward_PA=None):
    """E[g] over every batch; drawn from `sampler`, if it is not the policy itself."""
    drawn_from = sampler or policy
    ratio_PA = (policy.probability_PA / drawn_from.probability_PA).detach()
    mean = 0.0
    for index_PG, probability in drawn_from.batches(G):
        rewards_PG, inputs = policy.outputs(index_PG)
        if reward_PA is not None:
            rewards_PG = reward_PA.gather(1, index_PG)
        rho_PG = ratio_PA.gather(1, index_PG)
        rho = {"rho_PG": rho_PG} if sampler else {}
        baseline = estimators.baseline(name, rewards_PG, prior=prior, **inputs, **rho)
        own, rho_PG = (each if baseline.ndim == 2 else each[..., None] for each in (rewards_PG, rho_PG))
        mean = mean + probability * policy.gradient(index_PG, rho_PG * (own - baseline))
    return mean


def is_exact(got, expected):
    return torch.allclose(got, expected, rtol=0, atol=1e-12)


def test_the_bandit_is_what_it_says():
    theta = THETA.clone().requires_grad_()
    policy = bandit(prompts=2, theta=theta)
    torch.testing.assert_close(policy.probability_PA.sum(1), torch.ones(2, dtype=torch.float64))
    for p in range(2):
        for a in range(3):
            (score,) = torch.autograd.grad(policy.probability_PA[p, a].log(), theta, retain_graph=True)
            torch.testing.assert_close(policy.score_PATD[p, a].sum(0), score)
    (gradient,) = torch.autograd.grad(policy.objective(), theta)
    torch.testing.assert_close(policy.true_gradient(), gradient)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("G", [2, 3, 4])
def test_bias_is_as_claimed_on_one_prompt(name, G):
    policy = bandit(seed=G)
    mean, true = mean_gradient(name, policy, G), policy.true_gradient()
    assert is_exact(mean, true) == BASELINES[name].unbiased
    if name in {"mean", "grpo", "dr_grpo", "reinforce_pp"}:  # biased in scale only
        torch.testing.assert_close(mean, true * (G - 1) / G, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(("prompts", "outputs"), [(2, 3), (3, 2)])
def test_bias_is_as_claimed_on_prompts_jointly(name, prompts, outputs):
    """All outputs of all prompts listed together: for those that look at other prompts."""
    policy = bandit(prompts, outputs, seed=prompts)
    mean, true = mean_gradient(name, policy, 2, remembering()), policy.true_gradient()
    assert is_exact(mean, true) == BASELINES[name].unbiased
    if name == "mean":
        torch.testing.assert_close(mean, true / 2, rtol=0, atol=1e-12)
    if name == "reinforce_pp":  # every output is 1 / (P G) of its own baseline
        torch.testing.assert_close(mean, true * (1 - 1 / (2 * prompts)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["js", "oblr_shrunk"])
def test_groups_of_three_on_three_prompts_jointly(name):
    policy = bandit(3, 2, seed=7)
    assert is_exact(mean_gradient(name, policy, 3), policy.true_gradient())


@pytest.mark.parametrize("name", ["none", "js", "oblr_shrunk"])
def test_one_output_a_prompt_is_unbiased_too(name):
    policy = bandit(3, 3, seed=8)
    assert is_exact(mean_gradient(name, policy, 1), policy.true_gradient())


@pytest.mark.parametrize("strength", [0.0, 2.0, None])
def test_a_prior_fed_by_micro_batches_leaves_no_bias(strength):
    """Two prompts, one after the other: the second is shrunk towards the first."""
    policy, mean = bandit(2, outputs=2, seed=9), 0.0
    for index_PG, probability in policy.batches(2):
        rewards_PG, inputs = policy.outputs(index_PG)
        prior, baselines = remembering(strength), []
        for p in range(2):
            block = slice(p, p + 1)
            norm2_PG = inputs["norm2_PG"][block]
            baselines.append(estimators.baseline("oblr_shrunk", rewards_PG[block], norm2_PG=norm2_PG, prior=prior))
            prior.observe(rewards_PG[block], norm2_PG)
        mean = mean + probability * policy.gradient(index_PG, rewards_PG - torch.cat(baselines))
    assert is_exact(mean, policy.true_gradient())


@pytest.mark.parametrize("name", UNBIASED)
def test_outputs_of_another_policy_weighted_by_rho_are_unbiased(name):
    policy, sampler = bandit(2, seed=3), bandit(2, seed=3, theta=OTHER_THETA)
    mean = mean_gradient(name, policy, 2, Prior(2.0), sampler)
    assert is_exact(mean, policy.true_gradient())
    assert not is_exact(policy.true_gradient(), sampler.true_gradient())


@pytest.mark.parametrize("name", BASELINES)
def test_rho_enters_as_a_factor_of_the_squared_norm_or_not_at_all(name):
    inputs, prior = random_inputs(), remembering()
    rho_PG = torch.rand(4, 4, dtype=torch.float64) + 0.5
    plain = estimators.baseline(name, **inputs, prior=prior)
    got = estimators.baseline(name, **inputs, rho_PG=rho_PG, prior=prior)
    by_hand = inputs | {"norm2_PG": inputs["norm2_PG"] * rho_PG.square()}
    assert BASELINES[name].off_policy == (name in {"oblr", "oblr_shrunk", "oblr_lazy", "oblr_thrifty", "vcpo"})
    if BASELINES[name].off_policy:
        torch.testing.assert_close(got, estimators.baseline(name, **by_hand, prior=prior), rtol=0, atol=0)
        assert not torch.equal(got, plain)
    else:
        assert torch.equal(got, plain)


@pytest.mark.parametrize("name", ["rloo", "js", "oblr", "oblr_shrunk"])
def test_a_kl_penalty_in_the_reward_gives_the_gradient_of_both(name):
    """Grad(J - beta KL(pi || ref)) by autograd, the policy gradient by listing every batch."""
    beta, theta = 0.7, THETA.clone().requires_grad_()
    policy, reference = bandit(2, seed=4, theta=theta), bandit(2, seed=4, theta=OTHER_THETA)
    kl = (policy.probability_PA * (policy.probability_PA / reference.probability_PA).log()).sum(1).mean()
    (expected,) = torch.autograd.grad(policy.objective() - beta * kl, theta)
    penalised_PA = estimators.kl_in_reward(
        policy.reward_PA, policy.probability_PA.log(), reference.probability_PA.log(), beta
    )
    assert not penalised_PA.requires_grad
    assert is_exact(mean_gradient(name, policy, 2, reward_PA=penalised_PA), expected)


def test_a_kl_penalty_on_whole_number_rewards_is_not_rounded():
    got = estimators.kl_in_reward(
        torch.tensor([[1, 0]]), torch.tensor([[-1.5, -2.0]]), torch.tensor([[-1.0, -1.0]]), 0.5
    )
    assert got.tolist() == [[1.25, 0.5]]


def test_asking_for_a_baseline_teaches_the_prior_nothing():
    prior = remembering()
    before = copy.deepcopy(prior.state_dict())
    estimators.baseline("oblr_shrunk", torch.rand(2, 3), norm2_PG=torch.rand(2, 3), prior=prior)
    assert all(torch.equal(before[key], value) for key, value in prior.state_dict().items())


def proxied(policy, index_PG, which):
    """Weights of outputs: a proxy that knows the output alone; exact for the first prompt; one that sees a sibling."""
    exact_PG = policy.outputs(index_PG)[1]["norm2_PG"]
    rough_PG = torch.tensor([0.7, 2.9, 0.2], dtype=torch.float64)[index_PG] + 0.1 * policy.outputs(index_PG)[0].exp()
    if which == "looked at":
        return torch.cat([exact_PG[:1], rough_PG[1:]])
    return rough_PG * (1 + index_PG.roll(1, 1)) if which == "looks at a sibling" else rough_PG


def mean_gradient_by_weights(name, policy, G, prior, which):
    """E[g] over every batch, with rewards of 0 and 1 so that different siblings agree."""
    mean = 0.0
    for index_PG, probability in policy.batches(G):
        rewards_PG, _ = policy.outputs(index_PG)
        b_PG = estimators.baseline(name, rewards_PG, norm2_PG=proxied(policy, index_PG, which), prior=prior)
        mean = mean + probability * policy.gradient(index_PG, rewards_PG - b_PG)
    return mean


def binary_bandit(outputs, seed):
    policy = bandit(2, outputs, seed)
    policy.reward_PA = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)[:, :outputs]
    return policy


def after_looks(lazy):
    prior = remembering(2.0)
    prior.observe_ties(torch.tensor([1.0 if form == lazy else 5.0 for form in TIES]), torch.ones(len(TIES)))
    assert prior.current_lazy == lazy
    return prior


@pytest.mark.parametrize("which", ["proxy", "looked at"])
@pytest.mark.parametrize("lazy", TIES)
@pytest.mark.parametrize(("G", "outputs"), [(2, 3), (3, 3), (4, 2)])
@pytest.mark.parametrize("name", ["oblr", "oblr_shrunk", "oblr_lazy", "oblr_thrifty"])
def test_any_weight_of_the_output_alone_leaves_no_bias(name, G, outputs, lazy, which):
    policy = binary_bandit(outputs, seed=G)
    mean = mean_gradient_by_weights(name, policy, G, after_looks(lazy), which)
    assert is_exact(mean, policy.true_gradient())


@pytest.mark.parametrize("name", ["oblr", "oblr_shrunk", "oblr_lazy", "oblr_thrifty"])
def test_a_weight_that_looks_at_a_sibling_is_biased(name):
    policy = binary_bandit(3, seed=3)
    mean = mean_gradient_by_weights(name, policy, 3, after_looks((True, True)), "looks at a sibling")
    assert not torch.allclose(mean, policy.true_gradient(), rtol=0, atol=1e-4)


def test_siblings_that_agree_are_the_baseline_bit_by_bit():
    """So an output that earned the same has the advantage 0 exactly; a lone one is shrunk all the way."""
    rewards_PG = torch.tensor([[0.1, 0.1, 0.1], [0.3, 0.1, 0.1], [0.7, 0.2, 0.1], [0.9, 0.0, 0.0]])
    valid_PG = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]])
    inputs = {"norm2_PG": torch.rand(4, 3) + 0.1, "valid_PG": valid_PG}
    shrunk_PG = estimators.baseline("oblr_shrunk", rewards_PG, **inputs, prior=after_looks((True, True)))
    for name, lazy in (("oblr_lazy", (False, False)), ("oblr_thrifty", (True, True))):
        b_PG = estimators.baseline(name, rewards_PG, **inputs, prior=after_looks(lazy))
        assert [b_PG[0].tolist(), b_PG[1, 0]] == [rewards_PG[0].tolist(), rewards_PG[1, 1]]
        assert torch.equal(b_PG[1, 1:], shrunk_PG[1, 1:])
        assert torch.equal(b_PG[2:], shrunk_PG[2:])
    thrifty_PG = estimators.baseline("oblr_thrifty", rewards_PG, **inputs, prior=after_looks((False, False)))
    assert torch.equal(thrifty_PG, shrunk_PG)
    assert not torch.equal(thrifty_PG[0], rewards_PG[0])


def test_ties_may_be_broken_for_low_rewards_alone():
    """Low: at most what other prompts' outputs earn."""
    rewards_PG = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.5]])
    inputs = {"norm2_PG": torch.rand(3, 3) + 0.1}
    shrunk_PG = estimators.baseline("oblr_shrunk", rewards_PG, **inputs, prior=remembering(2.0))
    for lazy in TIES:
        b_PG = estimators.baseline("oblr_thrifty", rewards_PG, **inputs, prior=after_looks(lazy))
        for row, is_lazy in enumerate(lazy):
            assert torch.equal(b_PG[row], rewards_PG[row] if is_lazy else shrunk_PG[row])
        assert torch.equal(b_PG[2], shrunk_PG[2])
