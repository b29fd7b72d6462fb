"""The gradient's mean is grad J, by listing every batch, whether weights are exact or foretold from earlier steps."""

import copy

import pytest
import torch

from oblrpo.estimators import BASELINES
from oblrpo.scores import oracle
from oblrpo.tables.algorithms import Algorithm
from tests.scores.stay_double import StayDouble
from tests.step.world import P, batches, grads, minus_grad_J, policy_of, sequences_of
from tests.trainer.learners import drawn, learner_of, looking_at, samples_of

UNBIASED = [name for name, entry in BASELINES.items() if entry.unbiased and entry.trainable]
WEIGHTED = [name for name in UNBIASED if "norm2_PG" in BASELINES[name].needs]
LOOKS = {"at none": [], "at one": [0], "at all": [0, 1]}


@pytest.fixture
def world():
    """A policy of 3 tokens, and the rewards of every completion; all of them differ."""
    with StayDouble():
        policy = policy_of(3)
        yield policy, torch.randn(P, 3, dtype=torch.float64)


def learner_with_a_past(policy, name, G, reward_PV, looked):
    """A learner whose proxy and prior have learned of an earlier batch, in which every output came up once."""
    settings = {"num_generations": G, "max_completion_length": 1, "prior_strength": 2.0, "lr": 0.0}
    learner = looking_at(learner_of(policy, Algorithm(name), **settings), looked)
    past, (_, V) = learner.baseline, reward_PV.shape
    sequences = sequences_of(torch.arange(V).expand(P, V))
    norm2_S = oracle.norm2(policy.model, policy.logps(sequences).logps_S)
    policy.model.zero_grad()
    past.calibrated.observe(policy.logps(sequences).features, 1.7 * norm2_S ** torch.linspace(0.6, 1.2, P * V), V)
    weight_PV = past.calibrated.predict(policy.logps(sequences).features).view(P, V)
    assert (weight_PV / norm2_S.view(P, V)).log().abs().min() > 1e-3
    assert (weight_PV.std(1) > 1e-3 * weight_PV.mean(1)).all()
    past.prior.observe(reward_PV + 0.3, weight_PV, torch.ones(P, V, dtype=torch.bool))
    past.prior.next_step()
    return learner


def error(world, name, looked, spoil=lambda learner: None):
    """How far the gradient's mean over every batch is from grad J, as a share of it.

    Each batch is met with the same past, and learned from in a whole step of the learner. Groups are of 2, where
    `oblr` and the lazy forms are the other output's reward, however it is weighed. Their groups are of 3: of the
    first prompt all outputs are listed, and the second prompt's earn the same, so that it has no gradient.
    """
    (policy, reward_PV), (G, listed) = world, ((3, 1) if name in {"oblr", "oblr_lazy", "oblr_thrifty"} else (2, P))
    reward_PV[listed:] = 0.37
    learner = learner_with_a_past(policy, name, G, reward_PV, looked)
    spoil(learner)
    past, total, seen, update = copy.deepcopy(learner.state_dict()), 0, [], learner.update
    learner.update = lambda *given: seen.append(grads(policy)) or update(*given)
    for outputs_PG, rollouts, probability in batches(policy, reward_PV.shape[1], G, listed):
        learner.load_state_dict(copy.deepcopy(past), "a run")
        rewards_PG = reward_PV.gather(1, outputs_PG)
        result = learner.learn(drawn(learner, samples_of(rollouts, rewards_PG)), 1)
        assert len(result.updates) == 1
        total = total + probability * seen.pop()
    exact = minus_grad_J(policy, reward_PV)
    return float((total - exact).norm() / exact.norm())


@pytest.mark.parametrize("looked", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_the_mean_gradient_is_grad_J(world, name, looked):
    assert error(world, name, looked) < 1e-8


@pytest.mark.parametrize("name", [name for name in UNBIASED if name not in WEIGHTED])
def test_so_it_is_under_baselines_without_weights(world, name):
    assert error(world, name, [0]) < 1e-8


def fitted_first(learner):
    """Let the proxy learn of a batch's exact norms before it weighs the same batch."""
    past, take, by_proxy, looks = learner.baseline, learner.looks.take, learner.baseline.by_proxy, []

    def weighed(features, name=""):
        if looks:
            look = looks.pop().look
            past.calibrated.observe(features, look.norm2_PG.flatten(), look.norm2_PG.shape[1])
        return by_proxy(features, name)

    learner.looks.take = lambda *given: looks.append(take(*given))
    past.by_proxy = weighed


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_proxy_that_is_fitted_to_the_batch_which_it_weighs_would_be_noticed(world, name):
    assert error(world, name, [0, 1], fitted_first) > 1e-4
