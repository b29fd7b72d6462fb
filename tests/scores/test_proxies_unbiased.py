"""Why proxies are allowed: exact enumeration of a policy with four outputs, as in tests/estimators."""

import itertools
from functools import partial

import pytest
import torch

from oblrpo import estimators
from oblrpo.scores.proxies import PROXIES, CalibratedProxy, Features, logit_norm2
from tests.scores.test_proxies import power_law, random_features


def tiny_language():
    """Outputs e, ae, aae, aaa of a tabular policy over {e, a}, at most 3 tokens: probability, score, features, each."""
    torch.manual_seed(11)
    logits_TV = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    ids_SC = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    mask_SC = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    logits_SCV = logits_TV.expand(4, 3, 2)
    logp_SCV = logits_SCV.log_softmax(-1)
    token_logps_SC = logp_SCV.gather(2, ids_SC[..., None])[..., 0]
    logps_S = (token_logps_SC * mask_SC).sum(1)
    scores_SN = torch.stack([torch.autograd.grad(each, logits_TV, retain_graph=True)[0].flatten() for each in logps_S])
    entropy_SC = -(logp_SCV.exp() * logp_SCV).sum(-1)
    features = Features.from_tokens(logit_norm2(logits_SCV, ids_SC), token_logps_SC, entropy_SC, mask_SC)
    return logps_S.detach().exp(), scores_SN, features


def expected_gradient(weights_of_draw, rewards, G, in_sample=False):
    """E[(1/G) sum_j (F_j - b_j) s_j] over all 4^G draws, exactly; the weights may look at the whole draw."""
    probability, scores_SN, _ = tiny_language()
    mean = torch.zeros(scores_SN.shape[1], dtype=torch.float64)
    for draw in itertools.product(range(4), repeat=G):
        index = torch.tensor(draw)
        F, w = rewards[index], weights_of_draw(index)
        b = (w * F).sum() / w.sum() if in_sample else estimators.baseline("oblr", F[None], norm2_PG=w[None])[0]
        mean += probability[index].prod() * ((F - b)[:, None] * scores_SN[index]).mean(0)
    return mean, (probability * rewards) @ scores_SN


def past_proxy(features):
    proxy = CalibratedProxy()
    proxy.observe(random_features(64), power_law(random_features(64), (-0.5, 1.2, 0.4, 2.5)), 4)
    return proxy.predict(features)


REWARDS = torch.tensor([1.0, 0.0, -0.5, 2.0], dtype=torch.float64)
WEIGHTS = {name: partial(lambda function, features: function(features), function) for name, function in PROXIES.items()}
WEIGHTS |= {
    "calibrated on the past": past_proxy,
    "arbitrary": lambda features: torch.tensor([7.0, 0.01, 3.0, 0.5], dtype=torch.float64),
    "of the output's own reward": lambda features: (3 * REWARDS).exp(),
}


@pytest.mark.parametrize("G", [2, 3])
@pytest.mark.parametrize("name", WEIGHTS)
def test_leave_one_out_is_unbiased_with_any_weights_of_the_output_and_the_past(name, G):
    weights_S = WEIGHTS[name](tiny_language()[2])
    mean, true = expected_gradient(lambda index: weights_S[index], REWARDS, G)
    torch.testing.assert_close(mean, true, rtol=0, atol=1e-12)
    in_sample, _ = expected_gradient(lambda index: weights_S[index], REWARDS, G, in_sample=True)
    assert (in_sample - true).abs().max() > 1e-3  # biased with these weights, as with any


def test_weights_may_share_a_factor_of_the_whole_group_but_look_at_no_other_output():
    weights_S = WEIGHTS["arbitrary"](None)
    mean, true = expected_gradient(lambda index: weights_S[index] / weights_S[index].sum(), REWARDS, 3)
    torch.testing.assert_close(mean, true, rtol=0, atol=1e-12)
    centred, _ = expected_gradient(lambda index: 1 + (REWARDS[index] - REWARDS[index].mean()).square(), REWARDS, 3)
    assert (centred - true).abs().max() > 1e-3


def test_a_fit_to_the_batch_itself_would_be_biased():
    _, scores_SN, features = tiny_language()
    norm2_S = scores_SN.square().sum(1)

    def observed_first(index):
        proxy, mine = CalibratedProxy(ridge=0.01), features.at(index)
        proxy.observe(mine, norm2_S[index], 3)
        return proxy.predict(mine)

    mean, true = expected_gradient(observed_first, REWARDS, 3)
    assert (mean - true).abs().max() > 1e-4
