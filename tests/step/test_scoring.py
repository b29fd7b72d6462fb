"""Outputs of like length share a forward, and nothing else is changed by it."""

import pytest
import torch

from oblrpo.policy import Sequences
from oblrpo.rollout import Rollouts
from oblrpo.settings import ScoresConfig
from oblrpo.tables.algorithms import ALGORITHMS
from tests.trainer.learners import gradient_of, learner_of, samples_of

P, G, LONGEST = 4, 3, 12


@pytest.fixture
def samples(tiny_policy):
    """Prompts of one to four tokens, completions of one to twelve."""
    torch.manual_seed(1)
    prompt_SQ, completion_SC = torch.randint(tiny_policy.vocabulary, (P * G, 4 + LONGEST)).split([4, LONGEST], 1)
    prompt_mask_SQ = (torch.arange(4) >= torch.arange(P).repeat_interleave(G)[:, None]).long()
    mask_SC = (torch.arange(LONGEST) < torch.randint(1, LONGEST + 1, (P * G, 1))).long()
    sequences = Sequences.of(prompt_SQ, prompt_mask_SQ, completion_SC, mask_SC)
    return samples_of(Rollouts(sequences, [], None), torch.randn(P, G))


def forwards(policy, monkeypatch):
    """The rows of every forward from here on."""
    rows, plain = [], type(policy).logps

    def counted(self, sequences, *more):
        rows.append(sequences.count)
        return plain(self, sequences, *more)

    monkeypatch.setattr(type(policy), "logps", counted)
    return rows


def both(policy, samples, monkeypatch, algorithm, more=(), scores=None, **settings):
    """A pass with rows cut by length, and one without, each with the gradient that it left."""
    passes = []
    for tokens in (0, 10**6):
        monkeypatch.setitem(policy.__dict__, "tokens_of_a_forward", tokens)
        learner = learner_of(policy, algorithm, num_generations=G, scores=scores, **settings)
        rows = forwards(policy, monkeypatch)
        gradient = gradient_of(learner, samples, None, *more)
        passes.append((gradient, [p.grad.clone() for p in policy.parameters], len(rows)))
    return passes


def are_alike(cut, whole):
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-4, atol=1e-6)
    for name in ("norm2_PG", "group_norm2_P", "baseline_PG", "advantages_PG", "logps_PG", "token_logps_SC", "rho_PG"):
        torch.testing.assert_close(getattr(cut[0], name), getattr(whole[0], name), rtol=1e-4, atol=1e-6)
    assert cut[0].entropy == pytest.approx(whole[0].entropy, rel=1e-5)
    assert cut[2] > whole[2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_and_all_that_comes_with_it_are_the_same(tiny_policy, samples, monkeypatch, algorithm):
    cut, whole = both(tiny_policy, samples, monkeypatch, algorithm)
    assert whole[2] == 1
    are_alike(cut, whole)


def test_in_micro_batches_too(tiny_policy, samples, monkeypatch):
    are_alike(*both(tiny_policy, samples, monkeypatch, "oblrpo", prompts_per_micro_batch=2))


@pytest.mark.parametrize("ratio", ["sequence", "ppo"])
def test_under_ratios_to_an_old_policy(tiny_policy, samples, monkeypatch, ratio):
    sequences = samples.rollouts.sequences
    token_logps_SC = tiny_policy.logps(sequences).token_logps_SC.detach()
    old_SC = torch.where(sequences.own_SC.bool(), token_logps_SC + 0.3 * torch.randn_like(token_logps_SC), 0)
    are_alike(*both(tiny_policy, samples, monkeypatch, "rloo", [old_SC], ratio=ratio))


def test_a_method_that_keeps_nothing_takes_all_rows_in_one_forward(tiny_policy, samples, monkeypatch):
    scores = ScoresConfig(score_method="two_pass")
    cut, whole = both(tiny_policy, samples, monkeypatch, "oblrpo", scores=scores)
    assert cut[2] == whole[2] == 1
    torch.testing.assert_close(cut[1], whole[1], rtol=0, atol=0)
