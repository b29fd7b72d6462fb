"""What other prompts and earlier steps say, by brute force; the strength is chosen from the past only."""

import copy
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import Prior
from oblrpo.estimators.baselines import STRENGTHS, least_and_most_of_others, mean_of_others, sum_of_others

MASK_PG = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0], [0, 1, 0]]).double()


def draw(seed, prompts=4, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    rewards_PG = torch.randn(prompts, outputs, generator=generator, dtype=torch.float64)
    return rewards_PG, torch.rand(prompts, outputs, generator=generator, dtype=torch.float64) + 0.1


def brute(history, rewards_PG, norm2_PG, valid_PG, memory):
    """(w_bar, b_bar) of every prompt: earlier steps discounted, this step's micro-batches in full."""
    result = []
    for p in range(len(rewards_PG)):
        triples = [(memory**age, f, w) for age, f_PG, w_PG, v_PG in history for f, w in pairs(f_PG, w_PG, v_PG)]
        for q in range(len(rewards_PG)):
            if q != p:
                triples += [(1.0, f, w) for f, w in pairs(rewards_PG[q], norm2_PG[q], valid_PG[q])]
        count, weight = sum(k for k, _, _ in triples), sum(k * w for k, _, w in triples)
        result.append((weight / count, sum(k * w * f for k, f, w in triples) / weight))
    return result


def pairs(rewards, norm2, valid):
    flat = zip(*(each.flatten().tolist() for each in (rewards, norm2, valid)), strict=True)
    return [(f, w) for f, w, v in flat if v]


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_sums_leave_out_one_prompt_and_discount_earlier_steps(memory):
    prior, history = Prior(2.0, memory), []
    for step in range(3):
        for micro_batch in range(2):
            rewards_PG, norm2_PG = draw(10 * step + micro_batch)
            got = torch.cat(prior.of_others(rewards_PG, MASK_PG, norm2_PG), 1)
            expected = brute(history, rewards_PG, norm2_PG, MASK_PG, memory)
            torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)
            prior.observe(rewards_PG, norm2_PG, MASK_PG)
            history.append((0, rewards_PG, norm2_PG, MASK_PG))
        prior.next_step()
        history = [(age + 1, *rest) for age, *rest in history]


def test_a_first_prompt_alone_knows_nothing():
    weight_P1, baseline_P1 = Prior().of_others(*[torch.ones(1, 3).double()] * 3)
    assert weight_P1.tolist() == baseline_P1.tolist() == [[0.0]]


def risks(prior, batches):
    """Sum_j w_j (F_j - b_j(c))^2 of the batches for every strength, with the prior as it is."""
    return {
        c: sum(
            (w * (f - estimators.baseline("oblr_shrunk", f, norm2_PG=w, prior=with_strength(prior, c))) ** 2).sum()
            for f, w in batches
        )
        for c in STRENGTHS
    }


def with_strength(prior, strength):
    prior = copy.deepcopy(prior)
    prior.strength = strength
    return prior


def test_the_strength_has_the_least_discounted_risk_of_earlier_steps():
    """Prompts that agree want a large strength, prompts that differ a small one; the past fades."""
    memory, totals, chosen = 0.5, dict.fromkeys(STRENGTHS, 0.0), []
    prior = Prior(memory=memory)
    for step in range(6):
        rewards_PG, norm2_PG = draw(step, prompts=6)
        if step >= 2:
            rewards_PG += 3 * torch.randn(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        now = risks(prior, [(rewards_PG, norm2_PG)])
        prior.observe(rewards_PG, norm2_PG)
        prior.next_step()
        totals = {c: memory * (totals[c] + float(now[c])) for c in STRENGTHS}
        assert prior.current_strength == min(totals, key=totals.get)
        chosen.append(prior.current_strength)
    assert chosen[1] >= 8
    assert chosen[-1] <= 2


def test_until_there_is_a_past_the_strength_is_eight():
    prior = Prior()
    assert prior.current_strength == 8.0
    prior.observe(*draw(0))
    assert prior.current_strength == 8.0  # this batch does not count
    prior.next_step()
    assert prior.current_strength != 8.0


def test_a_prior_of_the_past_alone_knows_nothing_of_this_batch():
    """Nor do other prompts of the batch matter to a prompt's baseline, whichever are scored together with it."""
    first, second = draw(0), draw(1)
    prior = Prior(2.0, past_only=True)
    prior.observe(*first)
    alone = Prior(2.0, past_only=True)
    assert torch.equal(shrunk_of(prior, *second), shrunk_of(alone, *second)), "this step's do not count yet"
    prior.next_step()
    whole = shrunk_of(prior, *second)
    for p in range(len(whole)):
        rewards_PG, norm2_PG = (each[p : p + 1] for each in second)
        torch.testing.assert_close(shrunk_of(prior, rewards_PG, norm2_PG), whole[p : p + 1])
        prior.observe(rewards_PG, norm2_PG)
    assert not torch.equal(whole, shrunk_of(alone, *second)), "earlier steps count"
    prior.next_step()
    usual = Prior(2.0)
    for batch in (first, second):
        usual.observe(*batch)
        usual.next_step()
    state, other = prior.state_dict(), usual.state_dict()
    torch.testing.assert_close(state["sums"], other["sums"])


def shrunk_of(prior, rewards_PG, norm2_PG):
    return estimators.baseline("oblr_shrunk", rewards_PG, norm2_PG=norm2_PG, prior=prior)


def test_this_batch_never_chooses_the_strength():
    prior = Prior()
    prior.observe(*draw(1))
    prior.next_step()
    before = prior.current_strength
    for seed in range(2, 6):
        rewards_PG, norm2_PG = draw(seed)
        prior.observe(100 * rewards_PG, norm2_PG)
        assert prior.current_strength == before
    prior.next_step()
    assert prior.current_strength != before


def test_no_memory_forgets_the_batch_and_stays_at_eight():
    prior = Prior(memory=0.0)
    for step in range(3):
        prior.observe(*draw(step))
        prior.next_step()
    assert prior.current_strength == 8.0
    f, w = draw(9)
    assert torch.equal(
        estimators.baseline("oblr_shrunk", f, norm2_PG=w, prior=prior),
        estimators.baseline("oblr_shrunk", f, norm2_PG=w),
    )


@pytest.mark.parametrize("anything", [7.0, float("nan"), float("inf")])
def test_masked_outputs_teach_nothing(anything):
    rewards_PG, norm2_PG = draw(3)
    clean, other = Prior(), Prior()
    clean.observe(rewards_PG, norm2_PG, MASK_PG)
    other.observe(*(torch.where(MASK_PG == 1, each, anything) for each in (rewards_PG, norm2_PG)), MASK_PG)
    for key, value in clean.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("strength", [None, 3.0])
def test_a_resumed_prior_goes_on_identically(strength):
    first = Prior(strength, 0.7)
    for step in range(3):
        first.observe(*draw(step))
        first.next_step()
    saved = copy.deepcopy(first.state_dict())
    second = Prior(strength, 0.7)
    second.load_state_dict(saved)
    for step in range(3, 6):
        rewards_PG, norm2_PG = draw(step)
        results = []
        for prior in (first, second):
            results.append(estimators.baseline("oblr_shrunk", rewards_PG, norm2_PG=norm2_PG, prior=prior))
            prior.observe(rewards_PG, norm2_PG)
            prior.next_step()
        assert torch.equal(*results)
        assert first.current_strength == second.current_strength


def test_a_saved_state_does_not_change_with_the_prior():
    prior = Prior()
    prior.observe(*draw(0))
    state = prior.state_dict()
    before = copy.deepcopy(state)
    prior.observe(*draw(1))
    prior.next_step()
    assert all(torch.equal(before[key], state[key]) for key in before)
    resumed = Prior()
    resumed.load_state_dict(state)
    resumed.observe(*draw(1))
    assert all(torch.equal(before[key], state[key]) for key in before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"strength": -1.0}, "strength.*at least 0, got -1"), ({"strength": float("inf")}, "got inf"),
     ({"strength": float("nan")}, "got nan"), ({"memory": 1.0}, r"memory must lie in \[0, 1\), got 1.0"),
     ({"memory": -0.1}, "memory"), ({"memory": float("nan")}, "memory")],
)  # fmt: skip
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Prior(**settings)


def test_a_state_of_other_strengths_is_refused():
    state = Prior().state_dict() | {"risk": torch.zeros(3)}
    with pytest.raises(ValueError, match="saved with 3 strengths, here are 10"):
        Prior().load_state_dict(state)


def test_the_least_and_greatest_of_others():
    values_PG = torch.tensor([[1.0, 2.0, 0.1, 2.0], [0.1, 0.3, 0.1, 0.1], [5.0, 1.0, 1.0, 9.0]], dtype=torch.float64)
    valid_PG = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]])
    low_PG, high_PG = least_and_most_of_others(values_PG, valid_PG)
    assert low_PG.tolist()[0] == [0.1, 0.1, 1.0, 0.1]
    assert high_PG.tolist()[0] == [2.0, 2.0, 2.0, 2.0]
    assert [low_PG[1].tolist(), high_PG[1].tolist()] == [[0.1] * 4] * 2
    assert [low_PG[2].tolist()[0], high_PG[2].tolist()[0]] == [math.inf, -math.inf]


def ties(*norms, shares=(0.5, 0.75, 0.75, 1.0)):
    """m and the shares trained of every form, the laziest first."""
    return torch.tensor(norms, dtype=torch.float64), torch.tensor(shares, dtype=torch.float64)


def test_the_form_is_taken_that_costs_least():
    """Noise times cost, 1 for sampling and 3 for training, by all looks so far; a look counts as much as the next."""
    prior = Prior(memory=0.5)
    assert prior.current_lazy == (True, True)
    prior.observe_ties(*ties(1.0, 0.9, 0.9, 0.6))  # 2.5, 2.925, 2.925 and 2.4
    assert prior.current_lazy == (False, False)
    prior.observe_ties(*ties(0.0, 0.0, 0.0, 0.0))  # no gradient at all
    assert prior.current_lazy == (False, False)
    prior.observe_ties(*ties(1e-6, 0.9e-6, 0.6e-6, 0.7e-6))  # gradients a thousandth as long: 2.5, 2.9, 1.95, 2.8
    assert prior.current_lazy == (False, True)
    resumed, fresh = Prior(memory=0.5), Prior(memory=0.5)
    resumed.load_state_dict(prior.state_dict())
    for each in (resumed, fresh):
        each.observe_ties(*ties(1.0, 0.9, 0.775, 0.7))  # 2.5, 2.93, 2.52 and 2.8: the past decides
    assert [resumed.current_lazy, fresh.current_lazy] == [(False, True), (True, True)]
    assert Prior(lazy=(False, True)).current_lazy == (False, True)


def test_sums_and_means_of_others():
    values_PG = torch.tensor([[1.0, 2.0, 4.0], [1e30, 1.0, 2.0]], dtype=torch.float64)
    assert sum_of_others(values_PG).tolist() == [[6.0, 5.0, 3.0], [3.0, 1e30, 1e30]]
    valid_PG = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert mean_of_others(values_PG, valid_PG, 9.0).tolist() == [[4.0, 2.5, 1.0], [1.0, 9.0, 1.0]]
