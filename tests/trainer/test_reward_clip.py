"""Rewards beyond `reward_clip` are learned from as if they were its bound, and shown as they were."""

import copy
from dataclasses import replace

import pytest
import torch

from oblrpo.rollout import sample
from oblrpo.settings import TrainConfig
from oblrpo.trainer.look import _batch
from tests.trainer.learners import learner_of, samples_of


class NoSampler:
    def sync(self, policy):
        pass


@pytest.mark.parametrize("algorithm", ["oblrpo_shrunk", "grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_what_lies_further_from_0_is_taken_for_the_bound(tiny_policy, algorithm, beta):
    torch.manual_seed(1)
    rollouts = sample(tiny_policy, ["a", "bc"], 3, 3, 1.0, features=True)
    earned_PG, taken_PG = (
        torch.tensor([[0.5, 1e3, -1e6], [0.0, 1.0, 2.0]]),
        torch.tensor([[0.5, 1.5, -1.5], [0.0, 1.0, 1.5]]),
    )
    weights = []
    for rewards_PG, clip in ((earned_PG, 1.5), (taken_PG, 0.0), (earned_PG, 0.0)):
        learner = learner_of(copy.deepcopy(tiny_policy), algorithm, reward_clip=clip, beta=beta)
        learner.sampler = NoSampler()
        result = learner.learn_from(samples_of(rollouts, rewards_PG), 1)
        assert torch.equal(result.samples.rewards_PG, rewards_PG)
        weights.append(torch.cat([p.detach().flatten() for p in learner.policy.parameters]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_a_look_is_at_the_gradient_of_rewards_that_are_learned_from(tiny_policy):
    """The figures are those of rewards within the bound; the mean that is shown is of rewards as they were."""
    config, looks = TrainConfig(), []
    config = replace(config, rollout=replace(config.rollout, num_generations=3))
    for rewards, clip in (([0.5, 1e3, -1e6, 0.0, 1.0, 2.0], 1.5), ([0.5, 1.5, -1.5, 0.0, 1.0, 1.5], 0.0)):
        learner = learner_of(copy.deepcopy(tiny_policy), "oblrpo_shrunk", reward_clip=clip)
        rewards_PG = torch.tensor(rewards).view(2, 3)
        learner.sample = lambda _, rewards_PG=rewards_PG: samples_of(
            sample(tiny_policy, ["a", "bc"], 3, 3, 1.0, features=True), rewards_PG
        )
        looks.append(_batch(learner, [], config, 0))
        assert looks[-1][0] == pytest.approx(float(rewards_PG.mean()))
    assert looks[0][1].entries["rloo"] == looks[1][1].entries["rloo"]
