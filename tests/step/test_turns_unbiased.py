"""Two turns with an environment: the gradient's mean over every batch of episodes is grad J.

The policy draws a token. One of them is an answer and ends the episode, so that groups have members of one and of two
turns; to others the environment replies, by a rule or by chance, and the policy draws a second turn. Rewards are of
the whole episode, the environment's words included.
"""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from oblrpo.estimators import BASELINES
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from tests.scores.stay_double import StayDouble
from tests.step.test_unbiased import LOOKS, UNBIASED, WEIGHTED
from tests.step.turns import Row, grads, rollouts_of, scores, truth_of
from tests.step.world import P, policy_of
from tests.trainer.learners import learner_of, looking_at, samples_of


@dataclass(frozen=True)
class Environment:
    """What may follow a first turn that is no answer."""

    vocabulary: int = 2
    chances: tuple[float, ...] = (1.0,)
    """Of each of the environment's replies, which differ by prompt and by what was asked."""
    tokens: int = 1
    """The tokens of the second turn."""

    def episodes(self, prompt):
        """Every episode of a prompt, with the chance that the environment says what it says in it."""
        yield Row([prompt], [0], "o"), 1.0
        for asked, (reply, chance) in itertools.product(range(1, self.vocabulary), enumerate(self.chances)):
            words = [(prompt + asked + reply) % self.vocabulary, reply]
            for said in itertools.product(range(self.vocabulary), repeat=self.tokens):
                yield Row([prompt], [asked, *words, *said], "ott" + "o" * self.tokens), chance


RULE, CHANCE = Environment(), Environment(chances=(0.3, 0.7))
LONGER, WIDER = Environment(tokens=2), Environment(vocabulary=3)


class World:
    """A policy with every episode of each prompt, what each earns, and how probable it is."""

    def __init__(self, environment):
        self.policy = policy_of(environment.vocabulary)
        listed = [episode for prompt in range(P) for episode in environment.episodes(prompt)]
        self.rows, chances = map(list, zip(*listed, strict=True))
        self.chance_PE = torch.tensor(chances, dtype=torch.float64).view(P, -1)
        self.reward_PE = torch.randn(
            self.chance_PE.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
        )

    def probability_PE(self):
        """Of every episode, differentiable."""
        return truth_of(self.policy, self.rows).logps_S.view(P, -1).exp() * self.chance_PE

    def minus_grad_J(self):
        objective = (self.probability_PE() * self.reward_PE).sum(1).mean()
        return -torch.cat([each.flatten() for each in torch.autograd.grad(objective, self.policy.parameters)])


def learner_with_a_past(world, algorithm, G, looked):
    """A learner whose proxy and prior have learned of an earlier batch, in which every episode came up once."""
    learner = looking_at(
        learner_of(world.policy, algorithm, num_generations=G, max_completion_length=5, lr=0.0), looked
    )
    past, E = learner.baseline, world.reward_PE.shape[1]
    features = world.policy.logps(rollouts_of(world.policy, world.rows).sequences).features
    norm2_S = scores(world.policy, truth_of(world.policy, world.rows).logps_S).square().sum(1)
    past.calibrated.observe(features, 1.7 * norm2_S ** torch.linspace(0.6, 1.2, P * E), E)
    weight_PE = past.calibrated.predict(features).view(P, E)
    assert (weight_PE / norm2_S.view(P, E)).log().abs().min() > 1e-4
    assert (weight_PE.std(1) > 1e-3 * weight_PE.mean(1)).all()
    past.prior.observe(world.reward_PE + 0.3, weight_PE, torch.ones(P, E, dtype=torch.bool))
    past.prior.next_step()
    return learner


def error(environment, algorithm, G, listed, looked, counted=False, precise=False):
    """How far the gradient's mean over every batch is from grad J, as a share of it.

    Of the first `listed` prompts every group is listed; the others' episodes are the same in every batch and earn the
    same, so that they have no gradient. `counted` takes the environment's words for the policy's own. Unless it is
    `precise`, which takes twice as long, the model has norms and softmaxes in float32 inside.
    """
    with StayDouble() if precise else nullcontext():
        world = World(environment)
        world.reward_PE[listed:] = 0.37
        E, learner = world.reward_PE.shape[1], learner_with_a_past(world, algorithm, G, looked)
        drawn = rollouts_of(world.policy, world.rows, counted=counted)
        probability_PE, exact = world.probability_PE().detach(), world.minus_grad_J()
        assert torch.allclose(probability_PE.sum(1), torch.ones(P, dtype=torch.float64))
        past, total, whole, seen, update = copy.deepcopy(learner.state_dict()), 0, 0.0, [], learner.update
        learner.update = lambda *given: seen.append(grads(world.policy)) or update(*given)
        for chosen in itertools.product(range(E), repeat=listed * G):
            outputs_PG = torch.arange(P * G).view(P, G) % E
            outputs_PG[:listed] = torch.tensor(chosen).view(listed, G)
            rows_S = (outputs_PG + E * torch.arange(P)[:, None]).flatten()
            learner.load_state_dict(copy.deepcopy(past), "a run")
            result = learner.learn(samples_of(drawn.at(rows_S), world.reward_PE.gather(1, outputs_PG)), 1)
            assert len(result.updates) == 1
            probability = float(probability_PE.gather(1, outputs_PG)[:listed].prod())
            total, whole = total + probability * seen.pop(), whole + probability
        assert whole == pytest.approx(1)
        return float((total - exact).norm() / exact.norm())


DEFAULT = replace(ALGORITHMS["oblrpo_thrifty"], schedule="off")
"""The gradient of a default run; its schedule sets the rate alone."""


@pytest.mark.parametrize("looked", LOOKS.values(), ids=LOOKS)
def test_the_mean_gradient_of_a_default_run_is_grad_J(looked):
    """Groups of 3, in which weights matter: exact ones, or those of a proxy."""
    assert error(CHANCE, DEFAULT, 3, 1, looked) < 1e-5


def test_so_it_is_to_the_last_digits():
    assert error(CHANCE, DEFAULT, 3, 1, [0], precise=True) < 1e-12


@pytest.mark.parametrize("environment", [LONGER, WIDER], ids=["a longer second turn", "more to ask"])
def test_so_it_is_with_a_reply_by_rule(environment):
    assert error(environment, DEFAULT, 3, 1, []) < 1e-5


@pytest.mark.parametrize("name", UNBIASED)
def test_so_it_is_under_every_unbiased_baseline(name):
    """Groups of 2 of both prompts, of which a baseline may know."""
    assert error(RULE, Algorithm(name), 2, P, [0] if name in WEIGHTED else []) < 1e-5


@pytest.mark.parametrize("environment", [LONGER, CHANCE], ids=["rule", "chance"])
def test_words_of_the_environment_taken_for_the_policys_own_would_be_noticed(environment):
    assert error(environment, DEFAULT, 3, 1, [], counted=True) > 0.01


def test_a_baseline_that_looks_at_its_own_output_would_be_noticed():
    assert not BASELINES["opo"].unbiased
    assert error(RULE, Algorithm("opo"), 2, P, []) > 0.01
