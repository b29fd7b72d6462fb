"""Prompts drawn by their pull: nothing is biased, no weight is large, and large gradients are drawn more often."""

import itertools

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import PromptPulls, baseline
from oblrpo.estimators.prompt_pulls import EVENLY, MEMORY
from tests.estimators.bandits import bandit

M = 3


def with_history(steps=4, scale=1.0):
    """Prompt 0 has pulled, prompt 1 never has, prompt 2 was not met."""
    pulls = PromptPulls(M)
    for _ in range(steps):
        pulls.observe(torch.tensor([0, 1]), torch.tensor([0.8, 1.2]), scale * torch.tensor([5.0, 0.0]))
    return pulls


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_gradient_signal_and_noise_are_unbiased(steps):
    """Every two prompts drawn of three with replacement, every two outputs of three of each."""
    P, G, policy = 2, 2, bandit(prompts=M, outputs=3, seed=5)
    chance_M = with_history(steps).chances_M
    mean_D, second, moments_2 = torch.zeros(4, dtype=torch.float64), 0.0, torch.zeros(2).double()
    for prompts in itertools.product(range(M), repeat=P):
        index_P = torch.tensor(prompts)
        weight_P = 1 / (M * chance_M[index_P])
        for draw in itertools.product(range(3), repeat=P * G):
            index_PG = torch.tensor(draw).view(P, G)
            chance = float(chance_M[index_P].prod() * policy.probability_PA[index_P[:, None], index_PG].prod())
            rewards_PG = policy.reward_PA[index_P[:, None], index_PG]
            coef_PG = (rewards_PG - baseline("rloo", rewards_PG)) * weight_P[:, None]
            group_PD = (coef_PG[..., None] * policy.score_PATD.sum(2)[index_P[:, None], index_PG]).mean(1)
            gradient_D = group_PD.mean(0)
            mean_D += chance * gradient_D
            second += chance * float(gradient_D.square().sum())
            found = estimators.moments(group_PD.square().sum(1), gradient_D.square().sum())
            moments_2 += chance * torch.tensor([found.signal2, found.trace_cov])
    torch.testing.assert_close(mean_D, policy.true_gradient())
    signal2 = float(mean_D.square().sum())
    assert moments_2[0] == pytest.approx(signal2, rel=1e-6)
    assert moments_2[1] == pytest.approx(P * (second - signal2), rel=1e-6)


def test_draws_come_with_their_weights_and_no_weight_is_large():
    pulls = with_history(50)
    index_N, weight_N = pulls.draw(20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(weight_N, 1 / (M * pulls.chances_M[index_N]))
    share_M = torch.bincount(index_N, minlength=M) / 20_000
    torch.testing.assert_close(share_M.double(), pulls.chances_M, atol=0.02, rtol=0)
    assert share_M[0] > share_M[2] > share_M[1] > EVENLY / M / 2
    hard = PromptPulls(1000)
    hard.observe(torch.zeros(900, dtype=torch.long), torch.ones(900), torch.full((900,), 1e9))
    assert float((1 / (1000 * hard.chances_M)).max()) <= 1 / EVENLY
    assert float(hard.chances_M.sum()) == pytest.approx(1)


def test_the_scale_of_gradients_does_not_count_and_old_visits_fade():
    torch.testing.assert_close(with_history(scale=1e-9).chances_M, with_history(scale=1e9).chances_M)
    pulls = with_history()
    before = pulls.chances_M
    pulls.observe(torch.tensor([2, 2]), torch.ones(2), torch.zeros(2))  # no prompt has a gradient: nothing is known
    torch.testing.assert_close(pulls.chances_M, before)
    visits = pulls.state_dict()["visits"]
    pulls.observe(torch.tensor([2, 2, 2]), torch.ones(3), torch.ones(3))
    torch.testing.assert_close(pulls.state_dict()["visits"][:2], visits[:2] * MEMORY)


def test_what_is_known_of_a_prompt_is_its_own_and_shrunk():
    pulls = PromptPulls(2)
    pulls.observe(torch.tensor([0, 1]), torch.ones(2), torch.tensor([1.5, 0.5]))
    fade = MEMORY**0  # one step; its visits are fresh
    expected = torch.tensor([(1.5 * fade + 1) / 2, (0.5 * fade + 1) / 2], dtype=torch.float64).sqrt()
    torch.testing.assert_close(pulls.chances_M, (1 - EVENLY) * expected / expected.sum() + EVENLY / 2)


def test_the_state_is_taken_up_and_of_other_data_refused():
    pulls, other = with_history(), PromptPulls(M)
    other.load_state_dict(pulls.state_dict())
    torch.testing.assert_close(other.chances_M, pulls.chances_M)
    with pytest.raises(ValueError, match="had 3 training problems, and now 4"):
        PromptPulls(4).load_state_dict(pulls.state_dict())
