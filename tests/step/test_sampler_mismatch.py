"""A sampler that is not quite the policy: measured, and made up for by importance weights."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from oblrpo.diagnosis import Facts
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, baseline, baseline_inputs
from oblrpo.policy import Policy
from oblrpo.rollout import TransformersSampler, sample
from oblrpo.scores import oracle
from oblrpo.settings import ScoresConfig
from oblrpo.step.flow import log_ratio
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from oblrpo.trainer.loop import Monitors
from tests.scores.stay_double import StayDouble
from tests.step.world import P, batches, grads, logps_PV, minus_grad_J, policy_of
from tests.trainer import learners
from tests.trainer.learners import learn, one_pass, samples_of

V, G, LONGEST = 3, 2, 6


def perturbed(policy, size, seed=3):
    """The same policy with other weights, as another engine's would be."""
    other = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters:
            p += size * torch.randn(p.shape, generator=generator)
    return other


def learner_of(policy, algorithm, *, num_iterations=1, lr=0.1, scores=None, **rollout):
    settings = rollout | {"num_generations": G, "max_completion_length": LONGEST, "prior_strength": 2.0}
    scores = scores or ScoresConfig(look_steps=1, ledger_steps=0)
    return learners.learner_of(policy, algorithm, lr=lr, scores=scores, num_iterations=num_iterations, **settings)


@pytest.fixture
def world():
    """A policy with 3 tokens, another that samples, and rewards; a completion is one token."""
    policy = policy_of(V)
    with StayDouble():
        yield policy, perturbed(policy, 0.3), torch.randn(P, V, dtype=torch.float64)


def expected_gradient(world, algorithm, **settings):
    """Of -J over every batch that the sampler could draw, as the learner takes it."""
    policy, sampler, reward_PV = world
    learner = learner_of(policy, algorithm, **settings)
    total = 0
    for outputs_PG, rollouts, probability in batches(sampler, V, G):
        one_pass(learner, samples_of(rollouts, reward_PV.gather(1, outputs_PG)))
        total = total + probability * grads(policy)
    return total


@pytest.mark.parametrize("name", [name for name, entry in BASELINES.items() if entry.unbiased])
def test_without_truncation_the_gradient_is_that_of_the_policy(world, name):
    """By listing all 81 batches; the sampler's own gradient and the uncorrected one are elsewhere."""
    policy, sampler, reward_PV = world
    exact = minus_grad_J(policy, reward_PV)
    got = expected_gradient(world, Algorithm(name), sampler_correction="untruncated")
    torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-10)
    assert float((minus_grad_J(sampler, reward_PV) - exact).norm()) > 0.1 * float(exact.norm())


def test_uncorrected_the_gradient_is_another(world):
    policy, _, reward_PV = world
    exact = minus_grad_J(policy, reward_PV)
    got = expected_gradient(world, Algorithm("rloo"), sampler_correction="measured")
    assert float((got - exact).norm()) > 0.05 * float(exact.norm())


def test_truncation_biases_by_the_weight_that_it_cuts(world):
    """-E_mu[(rho - C)+ F grad log pi]."""
    policy, sampler, reward_PV = world
    clip = 1.1
    log_pi_PV, mu_PV = logps_PV(policy, V), logps_PV(sampler, V).detach().exp()
    rho_PV = log_pi_PV.detach().exp() / mu_PV
    assert 0 < int((rho_PV > clip).sum()) < P * V
    cut = (mu_PV * (rho_PV - clip).clamp(min=0) * reward_PV * log_pi_PV).sum(1).mean()
    bias = torch.cat([each.flatten() for each in torch.autograd.grad(cut, policy.parameters)])
    got = expected_gradient(world, Algorithm("none"), sampler_correction=f"truncated:{clip}")
    torch.testing.assert_close(got, minus_grad_J(policy, reward_PV) + bias, rtol=1e-8, atol=1e-10)


@pytest.fixture
def samples(tiny_policy):
    """Completions of a sampler 0.02 away, with what it reports, and rewards."""
    tiny_policy.model.double()
    torch.manual_seed(1)
    rollouts = sample(perturbed(tiny_policy, 0.02), ["a", "bcd", "ef"], G, LONGEST, 0.8, logps=True)
    return samples_of(rollouts, torch.randn(3, G, dtype=torch.float64))


def truth(policy, rollouts):
    """Log pi - log mu of each completion and |.| of each token, once more from scratch."""
    mask_SC = rollouts.sequences.own_SC.bool()
    token_logps_SC = policy.logps(rollouts.sequences, 0.8).token_logps_SC.detach()
    delta_SC = (token_logps_SC - rollouts.sampler_logps_SC).where(mask_SC, torch.zeros(()).double())
    return delta_SC.sum(1), delta_SC[mask_SC].abs()


@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize(
    ("clip", "correction"),
    [(3.0, "auto"), (1.01, "truncated:1.01"), (math.inf, "untruncated"), (math.inf, "measured")],
)
def test_metrics_and_weights_are_the_closed_form(tiny_policy, samples, clip, correction, micro_batch):
    learner = learner_of(
        tiny_policy, ALGORITHMS["oblrpo"], temperature=0.8, sampler_correction=correction,
        prompts_per_micro_batch=micro_batch,
    )  # fmt: skip
    estimate = one_pass(learner, samples)
    log_rho_S, difference_N = truth(tiny_policy, samples.rollouts)
    rho_S = log_rho_S.exp().clamp(max=clip)
    expected = {
        "sampling/sampling_logp_difference/mean": difference_N.mean(),
        "sampling/sampling_logp_difference/max": difference_N.max(),
        "sampling/sequence_logp_difference/mean": log_rho_S.abs().mean(),
        "sampling/importance_sampling_ratio/min": rho_S.min(),
        "sampling/importance_sampling_ratio/mean": rho_S.mean(),
        "sampling/importance_sampling_ratio/max": rho_S.max(),
        "sampling/truncated_ratio": (log_rho_S.exp() > clip).double().mean(),
    }
    assert estimate.further == pytest.approx({key: float(value) for key, value in expected.items()}, rel=1e-6)
    assert float(difference_N.mean()) > 1e-3
    if clip == 1.01:
        assert 0 < estimate.further["sampling/truncated_ratio"] < 1
    used_S = rho_S if correction != "measured" else torch.ones_like(rho_S)
    torch.testing.assert_close(estimate.rho_PG.flatten(), used_S, rtol=1e-6, atol=0)


def test_a_sampler_that_reports_nothing_is_taken_for_the_policy(tiny_policy, samples):
    learner = learner_of(tiny_policy, ALGORITHMS["oblrpo"], temperature=0.8)
    estimate = one_pass(learner, replace(samples, rollouts=replace(samples.rollouts, sampler_logps_SC=None)))
    plain = grads(tiny_policy)
    assert estimate.further == {}
    off = learner_of(tiny_policy, ALGORITHMS["oblrpo"], temperature=0.8, sampler_correction="measured")
    one_pass(off, samples)
    assert torch.equal(grads(tiny_policy), plain)
    one_pass(learner, samples)
    assert float((grads(tiny_policy) - plain).norm()) > 1e-3 * float(plain.norm())


@pytest.mark.parametrize("correction", ["truncated:1.05", "measured"])
def test_later_updates_are_weighed_against_the_sampler(tiny_policy, samples, correction):
    """min(C, pi_now / mu) in every update; without correction pi_now / pi_before, as if mu were pi_before."""
    learner = learner_of(
        tiny_policy, Algorithm("rloo"), num_iterations=3, lr=0.05, temperature=0.8, sampler_correction=correction,
    )  # fmt: skip
    result = learn(learner, samples)
    updates, rollouts = result.updates, samples.rollouts
    mu_S = (rollouts.sampler_logps_SC * rollouts.sequences.own_SC).sum(1)
    old_S = updates[0].gradient.token_logps_SC.sum(1)
    for update in updates:
        now_S = update.gradient.token_logps_SC.sum(1)
        expected_S = (now_S - mu_S).exp().clamp(max=1.05) if correction != "measured" else (now_S - old_S).exp()
        torch.testing.assert_close(update.gradient.weighed.rho_S, expected_S, rtol=1e-4, atol=0)
    assert float((updates[2].gradient.token_logps_SC.sum(1) - old_S).abs().max()) > 1e-3
    first = one_pass(learner_of(tiny_policy, Algorithm("rloo"), temperature=0.8), samples)  # where the policy is now
    assert result.further["sampling/sequence_logp_difference/mean"] == pytest.approx(
        float((old_S - mu_S).abs().mean()), rel=1e-6
    )
    assert first.further["sampling/sequence_logp_difference/mean"] != pytest.approx(
        float((old_S - mu_S).abs().mean()), rel=1e-3
    )


def test_the_schedule_gets_the_effective_sample_size(tiny_policy, samples):
    learner = learner_of(tiny_policy, Algorithm("rloo", schedule="ess"), temperature=0.8)
    update = learn(learner, samples).updates[0]
    rho_S = update.gradient.weighed.rho_S
    assert update.factor == pytest.approx(float((rho_S.mean() ** 2 / rho_S.square().mean()).sqrt()))
    assert update.factor < 1


@pytest.mark.parametrize("name", ["rloo", "oblr"])
def test_the_ledger_is_that_of_weighted_scores(tiny_policy, samples, name):
    """Its variance of the baseline in use is the gradient's own, tr H / P."""
    learner = learner_of(
        tiny_policy,
        Algorithm(name),
        temperature=0.8,
        scores=ScoresConfig(look_steps=1, ledger_steps=50),
    )
    learner.looks.exact = True
    estimate = one_pass(learner, samples, 1)
    assert estimate.further[f"variance/{name}"] == pytest.approx(estimate.moments.trace_cov / 3, rel=1e-6)
    assert estimate.further[f"signal2/{name}"] == pytest.approx(estimate.moments.signal2, rel=1e-5)


def test_the_ledger_of_a_baseline_by_token_is_that_of_weighted_scores(tiny_policy, samples):
    scores = ScoresConfig(look_steps=1, ledger_steps=50)
    learner = learner_of(tiny_policy, Algorithm("rloo"), temperature=0.8, scores=scores)
    learner.looks.exact = True
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    estimate = one_pass(learner, samples, 1)
    out, own_SC = tiny_policy.logps(sequences, 0.8), sequences.own_SC
    inputs = baseline_inputs(own_SC.view(3, G, -1), logit_norm2_PGT=out.logit_norm2_SC.view(3, G, -1))
    advantages_SC = (rewards_PG[..., None] - baseline("otb", rewards_PG, **inputs)).flatten(0, 1)
    rows = oracle.scores(tiny_policy.model, (out.token_logps_SC * advantages_SC * own_SC).sum(1))
    vectors_SN = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]) * estimate.rho_PG.view(-1, 1)
    prompts_PN = vectors_SN.view(3, G, -1).mean(1)
    assert estimate.further["variance/otb"] == pytest.approx(float(prompts_PN.var(0).sum()) / 3, rel=1e-5)


@pytest.mark.parametrize("broken", [math.nan, -math.inf, 0.5])
def test_what_is_no_log_probability_is_refused(tiny_policy, samples, broken):
    samples.rollouts.sampler_logps_SC[1, 0] = broken
    with pytest.raises(InputError, match="reports an invalid log-probability"):
        learn(learner_of(tiny_policy, Algorithm("rloo"), temperature=0.8), samples)


def test_what_stands_behind_the_end_does_not_matter():
    mask_SC = torch.tensor([[1, 1, 0], [1, 0, 0]])
    token_logps_SC, reported_SC = torch.randn(2, 3), -torch.rand(2, 3)
    clean = log_ratio(token_logps_SC, reported_SC, mask_SC)
    spoilt = log_ratio(token_logps_SC.where(mask_SC > 0, math.nan), reported_SC.where(mask_SC > 0, math.nan), mask_SC)
    assert all(map(torch.equal, clean, spoilt))
    assert len(clean[1]) == 3


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_policy_itself_reports_what_it_draws_from(tiny_policy, temperature):
    torch.manual_seed(4)
    plain = sample(tiny_policy, ["ab", "c"], 6, LONGEST, temperature)
    torch.manual_seed(4)
    drawn = TransformersSampler(tiny_policy, logps=True).sample(["ab", "c"], 6, LONGEST, temperature)
    assert torch.equal(plain.sequences.completion_SC, drawn.sequences.completion_SC)
    assert plain.sampler_logps_SC is None
    mask_SC = drawn.sequences.own_SC.bool()
    token_logps_SC = tiny_policy.logps(drawn.sequences, temperature).token_logps_SC.detach()
    torch.testing.assert_close(drawn.sampler_logps_SC[mask_SC], token_logps_SC[mask_SC], rtol=1e-4, atol=1e-4)


def test_a_large_mismatch_is_reported_once():
    fine = {
        "reward": 0.5, "frac_reward_zero_std": 0.2, "lr_factor": 0.5, "critical_batch_size": 40.0,
        "baseline/spread": 0.3, "sampling/sampling_logp_difference/mean": 0.02, "sampling/truncated_ratio": 0.2,
    }  # fmt: skip
    for corrects, apart, word in (
        (False, 0.2, "the gradient is biased"),
        (True, 1.2, "20% of the importance"),
    ):
        monitors = Monitors(Facts(corrects_sampler=corrects))
        rows = [fine | {"sampling/sequence_logp_difference/mean": apart / 3}] * 2
        rows += [fine | {"sampling/sequence_logp_difference/mean": apart}] * 4
        said = [monitors.observe(row | {"step": step}) for step, row in enumerate(rows, start=1)]
        ((message,),) = [messages for messages in said if messages]
        assert word in message


def test_rollouts_without_a_report_stay_without(tiny_policy):
    drawn = TransformersSampler(tiny_policy).sample(["a", "b"], 2, 3, 1.0)
    assert drawn.sampler_logps_SC is None
