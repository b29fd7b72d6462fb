"""The gradient of later updates under every ratio, against loop autograd of the published losses in float64."""

import dataclasses
import itertools
import math

import pytest
import torch

from oblrpo.algorithms import ratio_of, resolve
from oblrpo.errors import InputError
from oblrpo.estimators import NORMALISATIONS, RATIOS, WEIGHTINGS, baseline, baseline_inputs
from oblrpo.rollout import sample
from oblrpo.scores import oracle
from oblrpo.settings import AlgorithmConfig, OptimConfig, ScoresConfig, TrainConfig
from oblrpo.step.flow import clip_metrics
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from oblrpo.trainer.check import check
from tests.scores.stay_double import StayDouble
from tests.trainer import learners
from tests.trainer.learners import learn, one_pass, samples_of

P, G, LONGEST = 4, 3, 6
LOW, HIGH = 0.1, 0.15


@pytest.fixture(autouse=True)
def stay_double():
    """Norms and softmaxes of transformers go down to float32 without it."""
    with StayDouble():
        yield


@pytest.fixture
def batch(tiny_policy):
    """Completions in float64 with rewards, and the log-probabilities of a policy that has moved since."""
    tiny_policy.model.double()
    torch.manual_seed(1)
    rollouts = sample(tiny_policy, ["a", "bcd", "ef", "ghij"], G, LONGEST, 1.0)
    token_logps_SC = tiny_policy.logps(rollouts.sequences).token_logps_SC.detach()
    old_SC = token_logps_SC + 0.3 * torch.randn_like(token_logps_SC)
    return samples_of(rollouts, torch.randn(P, G, dtype=torch.float64)), old_SC


def learner_of(policy, algorithm, **settings):
    settings |= {"num_generations": G, "max_completion_length": LONGEST, "num_iterations": 2}
    return learners.learner_of(policy, algorithm, **settings)


def grads(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters])


def published(name, token_logps_SC, old_SC, own_SC, A_S1, low, high):
    """Each completion's loss as its authors write it, summed over its tokens; differentiated by autograd."""
    ratio_SC = (token_logps_SC - old_SC).exp()
    mean_S1 = ((token_logps_SC - old_SC) * own_SC).sum(1, keepdim=True) / own_SC.sum(1, keepdim=True)
    if name == "none":
        loss_SC = -A_S1 * token_logps_SC
    elif name == "sequence":
        return -A_S1[:, 0] * ((token_logps_SC - old_SC) * own_SC).sum(1).exp()
    elif name == "ppo":
        loss_SC = -torch.minimum(ratio_SC * A_S1, ratio_SC.clamp(1 - low, 1 + high) * A_S1)
    elif name == "gspo":  # times the length, which its own weighting 1 / n takes off again
        ratio_S1 = mean_S1.exp()
        return -torch.minimum(ratio_S1 * A_S1, ratio_S1.clamp(1 - low, 1 + high) * A_S1)[:, 0] * own_SC.sum(1)
    elif name == "cispo":
        loss_SC = -ratio_SC.clamp(max=high).detach() * A_S1 * token_logps_SC
    else:
        divergence_SC = (token_logps_SC.exp() - old_SC.exp()).abs().detach()  # total variation of {this token, another}
        away_SC = torch.where(A_S1 > 0, ratio_SC > 1, ratio_SC < 1)
        loss_SC = -A_S1 * ratio_SC * ~(away_SC & (divergence_SC > torch.where(A_S1 > 0, high, low)))
    return (loss_SC * own_SC).sum(1)


BOUNDS = {
    "cispo": {"epsilon_high": 1.1},
    "dppo": {"epsilon": 0.0003, "epsilon_high": 0.0004},
    "none": {},
    "sequence": {},
}


def bounds_of(name):
    return BOUNDS.get(name, {"epsilon": LOW, "epsilon_high": HIGH})


@pytest.mark.parametrize("weighting", ["sequence", "sequence_mean"])
@pytest.mark.parametrize("name", RATIOS)
def test_the_gradient_is_that_of_the_published_loss(tiny_policy, batch, name, weighting):
    samples, old_SC = batch
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    learner = learner_of(tiny_policy, Algorithm("rloo", weighting=weighting, ratio=name), **bounds_of(name))
    baseline_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (G - 1)
    found = one_pass(learner, samples, 0, old_SC, baseline_PG)
    ours = grads(tiny_policy)
    tiny_policy.model.zero_grad()
    own_SC, A_S1 = sequences.own_SC, (rewards_PG - baseline_PG).flatten()[:, None]
    token_logps_SC, bounds = tiny_policy.logps(sequences).token_logps_SC, learner.ratio.bounds
    weight_S = 1 / own_SC.sum(1).double() if weighting == "sequence_mean" else torch.ones(P * G, dtype=torch.float64)
    loss_S = published(name, token_logps_SC, old_SC, own_SC, A_S1, bounds.low, bounds.high) * weight_S
    (loss_S.sum() / (P * G)).backward()
    expected = grads(tiny_policy)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))
    clipped = clip_metrics(found.gradient, learner.ratio)
    assert all(0 < value < 1 for key, value in clipped.items() if key.endswith("mean") or key.startswith("cispo"))
    assert bool(clipped) == (name not in {"none", "sequence"})


def pairs():
    """Every algorithm with every ratio that is not refused beside it."""
    for algorithm, name in itertools.product(ALGORITHMS, RATIOS):
        try:
            check(TrainConfig(algorithm=AlgorithmConfig(algorithm=algorithm, ratio=name, num_iterations=2)))
        except InputError:
            continue
        yield algorithm, name


@pytest.mark.parametrize(("algorithm", "name"), [*pairs()])
def test_a_later_gradient_of_every_algorithm_is_that_of_the_published_loss(tiny_policy, batch, algorithm, name):
    """With an output without a reward, and a prompt that is left with one; all norms and weights taken by hand."""
    samples, old_SC = batch
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    row, valid_PG = dataclasses.replace(ALGORITHMS[algorithm], ratio=name), torch.ones(P, G, dtype=torch.bool)
    valid_PG[1, 1] = valid_PG[2, :2] = False
    learner = learner_of(tiny_policy, row, scores=ScoresConfig(look_steps=1, ledger_steps=0), **bounds_of(name))
    one_pass(learner, samples_of(samples.rollouts, rewards_PG, valid_PG), 1, old_SC)
    ours = grads(tiny_policy)
    tiny_policy.model.zero_grad()
    own_SC, bounds = sequences.own_SC, learner.ratio.bounds
    out = tiny_policy.logps(sequences)
    seen_PG = valid_PG & (valid_PG.sum(1, keepdim=True) >= row.smallest_group)
    norm2_S = oracle.norm2(tiny_policy.model, out.logps_S)
    inputs = baseline_inputs(own_SC.view(P, G, -1), norm2_S.view(P, G))
    baseline_PG = baseline(row.baseline, rewards_PG, valid_PG=seen_PG, **inputs)
    lengths_PG = own_SC.sum(1).view(P, G).double()
    coef_PG = WEIGHTINGS[row.weighting](lengths_PG, LONGEST, seen_PG) / seen_PG.sum(1, keepdim=True).clamp(min=1)
    coef_PG = coef_PG / NORMALISATIONS[row.normalisation](rewards_PG, seen_PG) / seen_PG.any(1).sum()
    A_S1 = (rewards_PG - baseline_PG).flatten()[:, None]
    loss_S = published(name, out.token_logps_SC, old_SC, own_SC, A_S1, bounds.low, bounds.high)
    (torch.where(seen_PG, coef_PG, 0).flatten() * torch.where(seen_PG.flatten(), loss_S, 0)).sum().backward()
    expected = grads(tiny_policy)
    assert float(expected.norm()) > 1e-3
    assert float((ours - expected).norm()) < 1e-9 * float(expected.norm())


@pytest.mark.parametrize("name", RATIOS)
def test_the_first_update_knows_no_ratio(tiny_policy, batch, name):
    """Bit for bit the gradient of one update; and against a policy that has not moved it is that again."""
    samples, _ = batch
    first = one_pass(learner_of(tiny_policy, ALGORITHMS["oblrpo"]), samples)
    expected = grads(tiny_policy)
    learner = learner_of(tiny_policy, Algorithm("oblr", ratio=name))
    found = one_pass(learner, samples)
    assert torch.equal(grads(tiny_policy), expected)
    assert found.moments == first.moments
    again = one_pass(learner, samples, 1, found.token_logps_SC, found.baseline_PG)
    torch.testing.assert_close(grads(tiny_policy), expected, rtol=1e-12, atol=0)
    assert again.moments.trace_cov == pytest.approx(first.moments.trace_cov, rel=1e-12)
    assert not any(clip_metrics(again.gradient, learner.ratio).values())


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_all_updates_on_a_batch_have_one_baseline(tiny_policy, batch, name, micro_batch):
    """Under every ratio, whether it clips by the sign of the advantage or not; weights are those of the one look."""
    samples, _ = batch
    learner = learner_of(
        tiny_policy, Algorithm("oblr_shrunk", ratio=name), lr=0.05, prompts_per_micro_batch=micro_batch,
        **({"epsilon": 1e-6} if name in {"ppo", "gspo", "dppo"} else bounds_of(name)),
    )  # fmt: skip
    looks, take = [], learner.looks.take
    learner.looks.take = lambda *given: looks.append(take(*given)) or looks[-1]
    result = learn(learner, samples)
    first, second = result.updates
    assert torch.equal(first.gradient.advantages_PG, second.gradient.advantages_PG)
    assert torch.equal(first.gradient.advantages_PG, samples.rewards_PG - result.baseline_PG)
    assert not torch.equal(first.gradient.token_logps_SC, second.gradient.token_logps_SC)
    assert len(looks) == 1
    if name in {"ppo", "gspo", "dppo"}:
        assert 0 < result.further["clip_ratio/region_mean"] <= 1


@pytest.mark.parametrize(("name", "correction"), [*((name, "truncated") for name in RATIOS), ("ppo", "measured")])
def test_a_sampler_that_differs_is_corrected_once(tiny_policy, batch, name, correction):
    """rho is min(C, old / sampler), beside the ratio; the importance weight itself is min(C, now / sampler)."""
    samples, old_SC = batch
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    sampler_SC = (old_SC + 0.1 * torch.randn_like(old_SC)).clamp(max=0)
    learner = learner_of(tiny_policy, Algorithm("rloo", ratio=name), sampler_correction=correction)
    fixed_PG = torch.zeros_like(rewards_PG)
    plain = one_pass(learner, samples, 0, old_SC, fixed_PG)
    reported = samples_of(dataclasses.replace(samples.rollouts, sampler_logps_SC=sampler_SC), rewards_PG)
    gradient = one_pass(learner, reported, 0, old_SC, fixed_PG)
    own_SC, token_logps_SC = sequences.own_SC, tiny_policy.logps(sequences).token_logps_SC.detach()
    from_SC = token_logps_SC if name == "sequence" else old_SC
    rho_PG = ((from_SC - sampler_SC) * own_SC).sum(1).exp().clamp(max=3).view(P, G)
    wanted_PG = rho_PG if name == "sequence" else rho_PG * plain.rho_PG
    torch.testing.assert_close(gradient.rho_PG, wanted_PG if correction == "truncated" else plain.rho_PG)


def test_a_batch_that_is_clipped_away_changes_nothing(tiny_policy, batch):
    samples, _ = batch
    learner = learner_of(tiny_policy, Algorithm("rloo", ratio="gspo", schedule="auto"), lr=0.05, epsilon=0.0)
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    token_logps_SC, toward_PG = (
        tiny_policy.logps(sequences).token_logps_SC.detach(),
        rewards_PG - rewards_PG.mean(1, True),
    )
    baseline_PG = rewards_PG - toward_PG
    old_SC = token_logps_SC - toward_PG.sign().flatten()[:, None] * 0.1
    before = [p.detach().clone() for p in tiny_policy.parameters]
    found = one_pass(learner, samples, 0, old_SC, baseline_PG)
    update = learner.update(found.gradient, found.moments, False)
    assert update.learning_rate == 0
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_policy.parameters, strict=True))


def test_bounds_are_the_sources_or_the_users():
    def bounds(ratio, **given):
        config = AlgorithmConfig(ratio=ratio, **given)
        return ratio_of(config, resolve(config, OptimConfig())).bounds

    assert (bounds("ppo").low, bounds("ppo").high) == (0.2, 0.2)
    assert (bounds("gspo").low, bounds("gspo").high) == (3e-4, 4e-4)
    assert (bounds("dppo").low, bounds("dppo").high) == (0.15, 0.15)
    assert (bounds("cispo").low, bounds("cispo").high) == (math.inf, 5.0)
    assert (bounds("ppo", epsilon=0.3).low, bounds("ppo", epsilon=0.3).high) == (0.3, 0.3)  # as in TRL
    assert (bounds("ppo", epsilon_high=0.28).low, bounds("ppo", epsilon_high=0.28).high) == (0.2, 0.28)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": "cispo", "epsilon": 0.2}, "epsilon has no effect"),
        ({"ratio": "cispo", "epsilon_high": 0.3}, "must be at least 1"),
        ({"ratio": "sequence", "epsilon_high": 0.3}, "epsilon_high has no effect"),
        ({"ratio": "ppo", "epsilon": -0.5}, "epsilon is -0.5; it must be a finite number of at least 0"),
        ({"ratio": "ppo", "algorithm": "vcpo"}, "importance weights of whole completions"),
        ({"ratio": "clip"}, "unknown ratio 'clip'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, said):
    with pytest.raises(InputError, match=said):
        check(TrainConfig(algorithm=AlgorithmConfig(num_iterations=2, **settings)))
