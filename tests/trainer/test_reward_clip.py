"""Rewards beyond `reward_clip` are learned from as if they were its bound, and shown as they were."""

import copy

import pytest
import torch

from oblrpo.rollout import sample
from tests.trainer.learners import learner_of, samples_of


class NoSampler:
    def sync(self, policy):
        pass


@pytest.mark.parametrize("algorithm", ["oblrpo_shrunk", "grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_what_lies_further_from_0_is_taken_for_the_bound(tiny_policy, algorithm, beta):
    torch.manual_seed(1)
    rollouts = sample(tiny_policy, ["a", "bc"], 3, 3, 1.0)
    earned_PG, taken_PG = (
        torch.tensor([[0.5, 1e3, -1e6], [0.0, 1.0, 2.0]]),
        torch.tensor([[0.5, 1.5, -1.5], [0.0, 1.0, 1.5]]),
    )
    weights = []
    for rewards_PG, clip in ((earned_PG, 1.5), (taken_PG, 0.0), (earned_PG, 0.0)):
        learner = learner_of(copy.deepcopy(tiny_policy), algorithm, reward_clip=clip, beta=beta)
        learner.core.sampler = NoSampler()
        result = learner.learn_from(samples_of(rollouts, rewards_PG), 1)
        assert torch.equal(result.samples.rewards_PG, rewards_PG)
        weights.append(torch.cat([p.detach().flatten() for p in learner.core.policy.parameters]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
