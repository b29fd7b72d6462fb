"""The taped gradient of a micro-batch, and the look at prompts, against loop autograd in float64."""

import pytest
import torch

from oblrpo import estimators
from oblrpo.adapters.trl import taped
from oblrpo.adapters.trl.taped import Outputs, TapedPass, add_to_gradient, by_count, drawn, own_norm2
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.sequences import MicroBatches
from oblrpo.scores import GroupTape, ScoreTape, oracle
from oblrpo.step import StepBaseline
from tests.scores.stay_double import StayDouble
from tests.trl.support import tiny_policy

P, G, LONGEST = 4, 3, 12


@pytest.fixture(autouse=True)
def stay_double():
    """Norms and softmaxes of transformers go down to float32 without it."""
    with StayDouble():
        yield


@pytest.fixture
def policy():
    return tiny_policy(torch.float64)


@pytest.fixture
def outputs(policy):
    """Prompts of one to four tokens, completions of one to twelve; one of them has no reward."""
    torch.manual_seed(1)
    prompt_SQ, completion_SC = torch.randint(policy.vocabulary, (P * G, 4 + LONGEST)).split([4, LONGEST], 1)
    prompt_mask_SQ = (torch.arange(4) >= torch.arange(P).repeat_interleave(G)[:, None]).long()
    mask_SC = (torch.arange(LONGEST) < torch.randint(1, LONGEST + 1, (P * G, 1))).long()
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[2, 1] = False
    rewards_PG = torch.where(valid_PG, torch.randn(P, G, dtype=torch.float64), 0)
    return Outputs(Sequences.of(prompt_SQ, prompt_mask_SQ, completion_SC, mask_SC), rewards_PG, valid_PG)


def scores_of(policy, sequences):
    """grad log pi(o|q) of every output by a backward each, (P, G, N)."""
    rows = oracle.scores(policy.model, policy.logps(sequences).logps_S)
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(P, G, -1)


@pytest.mark.parametrize("tokens", [0, 10**6])  # rows of like length share a forward, and all share one
@pytest.mark.parametrize(("method", "fixed"), [("auto", False), ("gram", False), ("two_pass", False), ("group", True)])
def test_the_gradient_is_minus_the_mean_of_advantages_times_scores(policy, outputs, monkeypatch, tokens, method, fixed):
    monkeypatch.setitem(vars(policy), "tokens_of_a_forward", tokens)
    score_PGN = scores_of(policy, outputs.sequences)
    norm2_PG = score_PGN.square().sum(2)
    rewards_PG, valid_PG, forwards, logps = outputs.rewards_PG, outputs.valid_PG, [], Policy.logps
    b_PG = estimators.baseline("oblr", rewards_PG, valid_PG=valid_PG, norm2_PG=norm2_PG)
    if fixed:
        outputs = Outputs(outputs.sequences, rewards_PG, valid_PG, b_PG)

    def counted(self, sequences, *more):
        forwards.append(sequences.count)
        return logps(self, sequences, *more)

    monkeypatch.setattr(Policy, "logps", counted)
    tape = GroupTape(policy.model) if method == "group" else ScoreTape(policy.model, method)
    part = add_to_gradient(outputs, 10, policy, 1.0, tape, TapedPass(StepBaseline("oblr", "exact")))
    assert (len(forwards) > 1) == (tokens == 0 and method in {"auto", "gram"})
    by_group_PN = -(torch.where(valid_PG, rewards_PG - b_PG, 0)[..., None] * score_PGN).sum(1) / 10
    found_N = torch.cat([p.grad.flatten() for p in policy.parameters])
    torch.testing.assert_close(found_N, by_group_PN.sum(0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(part.group_norm2_P, by_group_PN.square().sum(1), rtol=1e-9, atol=1e-12)
    own_SC, alone = outputs.sequences.own_SC.bool(), logps(policy, outputs.sequences)
    for name in ("token_logps_SC", "entropy_SC", "logit_norm2_SC"):
        width, values_SC = getattr(part.logps, name).shape[1], getattr(alone, name).detach()
        mine_SC = own_SC[:, :width]
        torch.testing.assert_close(getattr(part.logps, name)[mine_SC], values_SC[mine_SC], rtol=1e-9, atol=1e-12)
    if fixed:
        assert part.norm2_S is None
    else:
        torch.testing.assert_close(part.norm2_S.view(P, G), norm2_PG, rtol=1e-9, atol=1e-12)


def test_norms_are_taken_to_weigh_rewards_or_beside_proxies(policy):
    exact, calibrated = StepBaseline("oblr", "exact"), StepBaseline("oblr", "calibrated")
    assert TapedPass(exact).takes_norms()
    assert not TapedPass(exact).takes_norms(torch.zeros(P, G))
    assert [TapedPass(calibrated, step, 3).takes_norms() for step in range(4)] == [True, False, False, True]
    assert not TapedPass(calibrated).takes_norms()
    assert not TapedPass(calibrated, 3).takes_norms()


def test_rows_are_ordered_by_how_many_are_their_group_s():
    owner_N = torch.tensor([0, 1, 1, 1, 2, 3, 3, 3, 4])
    assert owner_N[by_count(owner_N)].tolist() == [0, 2, 4, 1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("prompts", [0, 1])
def test_a_look_gives_the_prompts_own_mean_gradients_and_no_gradient(policy, outputs, prompts):
    weight_P = torch.tensor([0.5, 0.0, 2.0, 0.25], dtype=torch.float64)
    score_PGN = scores_of(policy, outputs.sequences)
    c_PG = outputs.rewards_PG.masked_fill(~outputs.valid_PG, torch.nan)
    expected = 0.0
    for p, weight in enumerate(weight_P.tolist()):
        places = outputs.valid_PG[p].nonzero().flatten().tolist()
        c = {j: float(c_PG[p, j] - c_PG[p, [i for i in places if i != j]].mean()) for j in places}
        pairs = [c[j] * c[k] * float(score_PGN[p, j] @ score_PGN[p, k]) for j in places for k in places if j != k]
        expected += weight * sum(pairs) / len(pairs) / (1 + 1 / (len(places) - 1) ** 2)
    assert own_norm2(outputs, weight_P, policy, 1.0, MicroBatches(prompts)) == pytest.approx(expected, rel=1e-9)
    assert all(parameter.grad is None for parameter in policy.parameters)
    assert own_norm2(outputs, 0 * weight_P, policy, 1.0, MicroBatches(prompts)) == 0


@pytest.mark.parametrize("looked_at", [16, 2, 0.5])
def test_whatever_chances_the_rewards_give_the_mean_is_that_of_all_prompts(looked_at, monkeypatch):
    """Of 20,000 draws, within 5 standard errors; of those prompts whose outputs earn differently."""
    monkeypatch.setattr(taped, "LOOKED_AT", looked_at)
    generator = torch.Generator().manual_seed(3)
    rewards_PG, valid_PG = torch.rand(6, 3, generator=generator), torch.ones(6, 3, dtype=torch.bool)
    rewards_PG[1] *= 10
    rewards_PG[2] = 0.4
    valid_PG[3, 1:] = False
    valid_PG[4, 0] = False
    rewards_PG[~valid_PG] = torch.nan
    weight_RP = torch.stack([drawn(rewards_PG, valid_PG, seed) for seed in range(20_000)])
    assert not weight_RP[:, [2, 3]].any()
    errors_P = weight_RP.std(0) / len(weight_RP) ** 0.5
    for p in (0, 1, 4, 5):
        assert abs(float(weight_RP[:, p].mean()) - 1 / 5) < 5 * float(errors_P[p])
        assert 0 < float(errors_P[p]) < 0.2


def test_of_prompts_that_earn_alike_nothing_has_to_be_looked_at():
    """Their estimates are 0; and without two outputs that count, nothing is known."""
    alike_PG, all_PG = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert drawn(alike_PG, all_PG, 0).tolist() == [0.0, 0.0]
    assert drawn(alike_PG, torch.eye(2).bool(), 0).isnan().all()
