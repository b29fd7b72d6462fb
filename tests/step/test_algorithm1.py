import dataclasses
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.errors import DivergedError, InputError
from oblrpo.estimators.measured_rate import BEGIN
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape, oracle
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from tests.trainer import learners
from tests.trainer.learners import gradient_of, one_pass, samples_of

P, G, LONGEST = 4, 3, 6


@pytest.fixture
def samples(tiny_policy):
    torch.manual_seed(1)
    return samples_of(sample(tiny_policy, ["a", "bcd", "ef", "ghij"], G, LONGEST, 1.0), torch.randn(P, G))


def learner_of(policy, algorithm="oblrpo", optimizer=torch.optim.SGD, lr=0.1, *, micro_batch=0, **settings):
    settings |= {"num_generations": G, "max_completion_length": LONGEST, "prompts_per_micro_batch": micro_batch}
    return learners.learner_of(policy, algorithm, optimizer=optimizer, lr=lr, **settings)


def grads(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_is_the_formula(tiny_policy, samples, algorithm):
    """-(1/PG) sum A grad log pi with everything recomputed by hand and by loop autograd."""
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    estimate = one_pass(learner_of(tiny_policy, algorithm), samples)
    ours = grads(tiny_policy)
    tiny_policy.model.zero_grad()
    norm2_PG = oracle.norm2(tiny_policy.model, tiny_policy.logps(sequences).logps_S).view(P, G)
    out = tiny_policy.logps(sequences)
    lengths_PG, mask_SC = sequences.lengths_S.view(P, G), sequences.own_SC
    table = ALGORITHMS[algorithm]
    inputs = {"norm2_PG": norm2_PG, "length_PG": lengths_PG, "logit_norm2_PGT": out.logit_norm2_SC.view(P, G, -1),
              "token_mask_PGT": mask_SC.view(P, G, -1)}  # fmt: skip
    baseline = estimators.baseline(table.baseline, rewards_PG, **inputs)
    divisor_PG = {"grpo": rewards_PG.std(1, keepdim=True) + 1e-4, "reinforce_pp": rewards_PG.std() + 1e-4}.get(
        algorithm, 1
    )
    weight_PG = {"grpo": 1 / lengths_PG, "dr_grpo": torch.full((P, G), 1 / LONGEST)}.get(algorithm, torch.ones(P, G))
    coef_S = -((rewards_PG - baseline) / divisor_PG * weight_PG / (P * G)).flatten()
    group_norm2_P = oracle.accumulate(tiny_policy.model, out.logps_S, coef_S, G) * P**2
    expected = grads(tiny_policy)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))
    moments = estimators.moments(group_norm2_P, expected.square().sum())
    assert estimate.moments.trace_cov == pytest.approx(moments.trace_cov, rel=1e-4)
    assert estimate.moments.signal2 == pytest.approx(moments.signal2, rel=1e-3, abs=1e-4 * moments.trace_cov)
    assert estimate.norm2 == pytest.approx(float(expected.square().sum()), rel=1e-4)
    torch.testing.assert_close(estimate.advantages_PG, rewards_PG - baseline)
    torch.testing.assert_close(estimate.norm2_PG, norm2_PG, rtol=1e-4, atol=0)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "oblrpo_shrunk"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_micro_batches_change_nothing(tiny_policy, samples, algorithm, micro_batch):
    whole = one_pass(learner_of(tiny_policy, algorithm), samples)
    expected = grads(tiny_policy)
    split = one_pass(learner_of(tiny_policy, algorithm, micro_batch=micro_batch), samples)
    torch.testing.assert_close(grads(tiny_policy), expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))
    for name, first in vars(whole).items():
        second = getattr(split, name)
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert split.moments.trace_cov == pytest.approx(whole.moments.trace_cov, rel=1e-4)
    assert split.entropy == pytest.approx(whole.entropy, rel=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("tokens", [1, 60])
def test_a_budget_of_tokens_changes_nothing(tiny_policy, samples, algorithm, tokens):
    """Groups go through the model in another order; what is said of each prompt is in the batch's own."""
    sequences = samples.rollouts.sequences
    learner = learner_of(tiny_policy, algorithm)
    learner.core.baseline.prior.past_only = True  # as under a budget
    whole = one_pass(learner, samples)
    expected = grads(tiny_policy)
    learner = learner_of(tiny_policy, algorithm, tokens_per_micro_batch=tokens)
    blocks = learner.core.micro_batches.of(sequences, G)
    assert len(blocks) == {1: P, 60: 2}[tokens]
    split = one_pass(learner, samples)
    torch.testing.assert_close(grads(tiny_policy), expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))
    for name, first in vars(whole).items():
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, getattr(split, name), rtol=1e-4, atol=1e-5)
    assert split.moments.trace_cov == pytest.approx(whole.moments.trace_cov, rel=1e-4)


def test_off_policy_the_score_carries_the_importance_weight(tiny_policy, samples):
    """grad of the mean of rho A with rho = pi / pi_old; the baseline is weighted by rho^2 w."""
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    own_SC, token_logps_SC = sequences.own_SC, tiny_policy.logps(sequences).token_logps_SC.detach()
    old_token_logps_SC = token_logps_SC + 0.3 * torch.randn_like(token_logps_SC)
    old_logps_PG = (old_token_logps_SC * own_SC).sum(1).view(P, G)
    gradient_of(learner_of(tiny_policy), samples, old_token_logps_SC=old_token_logps_SC)
    ours = grads(tiny_policy)
    tiny_policy.model.zero_grad()
    norm2_PG = oracle.norm2(tiny_policy.model, tiny_policy.logps(sequences).logps_S).view(P, G)
    rho_PG = (tiny_policy.logps(sequences).logps_S.view(P, G) - old_logps_PG).exp()
    baseline_PG = estimators.baseline("oblr", rewards_PG, norm2_PG=norm2_PG * rho_PG.detach() ** 2)
    (-(rho_PG * (rewards_PG - baseline_PG)).mean()).backward()
    expected = grads(tiny_policy)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))


def test_several_updates_use_the_first_log_probabilities_as_old(tiny_policy, samples):
    learner = learner_of(tiny_policy, num_iterations=3, lr=0.01, schedule_floor=1.0)
    old, gradient = [], learner.gradient
    learner.gradient = lambda *given: old.append(given[-1].old_token_logps_SC) or gradient(*given)
    updates = learner.learn(samples).updates
    assert old[0] is None
    assert old[1] is old[2] is updates[0].gradient.token_logps_SC
    assert ((updates[2].gradient.token_logps_SC - old[2]).exp() - 1).abs().max() > 1e-3


def test_the_update_has_the_rate_that_is_reported(tiny_policy, samples):
    learner = learner_of(tiny_policy, lr=0.5)
    before = torch.cat([p.detach().clone().flatten() for p in tiny_policy.parameters])
    taken = gradient_of(learner, samples)
    gradient = grads(tiny_policy)
    update = learner.update(taken)
    after = torch.cat([p.detach().flatten() for p in tiny_policy.parameters])
    assert update.learning_rate == pytest.approx(0.5 * update.factor)
    torch.testing.assert_close(after, before - update.learning_rate * gradient)


def test_the_gradient_is_measured_before_clipping(tiny_policy, samples):
    learner = learner_of(tiny_policy, "rloo", max_grad_norm=1e-3, lr=1.0)
    before = torch.cat([p.detach().clone().flatten() for p in tiny_policy.parameters])
    update = learner.learn(samples).updates[0]
    after = torch.cat([p.detach().flatten() for p in tiny_policy.parameters])
    assert update.gradient.norm2 > 1e-2
    assert (after - before).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_groups_without_variance_give_no_gradient(tiny_policy, samples):
    equal = dataclasses.replace(samples, rewards_PG=torch.ones(P, G))
    for algorithm in ("oblrpo", "rloo", "grpo"):
        assert one_pass(learner_of(tiny_policy, algorithm), equal).norm2 == 0


@pytest.mark.parametrize("step", [0, 1])  # the ledger comes first in step 1
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_broken_policy_is_explained(tiny_policy, samples, algorithm, step):
    with torch.no_grad():
        tiny_policy.parameters[0][5] = float("nan")
    with pytest.raises(DivergedError, match=r"training has diverged: a log-probability is NaN"):
        learner_of(tiny_policy, algorithm).learn(samples, step=step)


@pytest.mark.parametrize(
    ("method", "numbers", "what"), [("norm2", P * G, "score norm"), ("accumulate", P, "gradient of a prompt")]
)
def test_a_gradient_that_overflows_is_skipped(tiny_policy, samples, monkeypatch, method, numbers, what):
    monkeypatch.setattr(ScoreTape, method, lambda *_: torch.full((numbers,), math.inf))
    result = learner_of(tiny_policy).learn(samples)
    assert (result.updates, result.skipped) == ([], what)


def test_weights_that_overflow_have_diverged(tiny_policy, samples):
    """Nothing of before is kept to go back to: the run ends, and the checkpoint before is whole."""
    huge = dataclasses.replace(samples, rewards_PG=samples.rewards_PG * 1e10)
    with pytest.raises(DivergedError, match="a weight is NaN or infinite; lower learning_rate"):
        learner_of(tiny_policy, "rloo", lr=3e38).learn(huge)


def test_what_speaks_of_nan_need_not_have_diverged(tiny_policy, samples):
    rollouts = samples.rollouts
    nan_SC = torch.full_like(rollouts.sequences.completion_SC, math.nan, dtype=torch.float32)
    broken = dataclasses.replace(samples, rollouts=dataclasses.replace(rollouts, sampler_logps_SC=nan_SC))
    with pytest.raises(InputError, match="the sampler reports an invalid log-probability") as caught:
        learner_of(tiny_policy).learn(broken)
    assert not isinstance(caught.value, DivergedError)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_rewarding_one_completion_makes_it_likelier(tiny_policy, algorithm, optimizer):
    torch.manual_seed(2)
    sampled, rewards_PG = sample(tiny_policy, ["ab", "cd"], 4, LONGEST, 1.0), torch.eye(4)[[0, 2]]
    samples = samples_of(sampled, rewards_PG)
    rate = 0.05 if optimizer is torch.optim.SGD else 1e-3
    learner = learner_of(tiny_policy, algorithm, optimizer, rate, schedule_floor=1.0)
    before = tiny_policy.logps(samples.rollouts.sequences).logps_S
    for _ in range(5):
        learner.learn(samples)
    gain_PG = (tiny_policy.logps(samples.rollouts.sequences).logps_S - before).view(2, 4)
    assert gain_PG[rewards_PG == 1].min() > gain_PG[rewards_PG == 0].mean()


def test_the_shrunk_baseline_sees_earlier_blocks_and_steps_only(tiny_policy, samples):
    """In micro-batches a prompt's prior is that of its block's other prompts, of the blocks before, and of the past."""
    rewards_PG = samples.rewards_PG
    learner = learner_of(tiny_policy, "oblrpo_shrunk", micro_batch=2)
    learner.core.baseline.prior = estimators.Prior(3.0)
    estimate = one_pass(learner, samples)
    prior = estimators.Prior(3.0)
    expected = []
    for block in (slice(0, 2), slice(2, 4)):
        norm2_PG = estimate.norm2_PG[block]
        expected.append(estimators.baseline("oblr_shrunk", rewards_PG[block], norm2_PG=norm2_PG, prior=prior))
        prior.observe(rewards_PG[block], norm2_PG)
    torch.testing.assert_close(estimate.baseline_PG, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_later_updates_on_a_batch_have_not_seen_it(tiny_policy, samples):
    learner = learner_of(tiny_policy, Algorithm("oblr_shrunk"), num_iterations=2, lr=0.0, micro_batch=1)
    updates = learner.learn(samples).updates
    torch.testing.assert_close(updates[0].gradient.baseline_PG, updates[1].gradient.baseline_PG)
    once = learner_of(tiny_policy, Algorithm("oblr_shrunk"), lr=0.0, micro_batch=1)
    once.learn(samples)
    for key, value in once.core.baseline.prior.state_dict().items():
        torch.testing.assert_close(learner.core.baseline.prior.state_dict()[key], value)
    again = learner.learn(samples).updates[0]
    assert (again.gradient.baseline_PG - updates[0].gradient.baseline_PG).abs().max() > 1e-3


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("micro_batch", [0, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_auto_measures_the_kl_of_a_first_update_and_makes_it_as_long_as_it_was_meant(
    tiny_policy, samples, optimizer, micro_batch, every
):
    sequences = samples.rollouts.sequences
    first = torch.cat([p.detach().clone().flatten() for p in tiny_policy.parameters])
    for rate, kl, shortened in ((1e-4, 1e9, False), (10.0, 1e-3, True)):
        torch.nn.utils.vector_to_parameters(first.clone(), tiny_policy.parameters)
        algorithm = dataclasses.replace(ALGORITHMS["grpo"], schedule="auto")
        learner = learner_of(
            tiny_policy, algorithm, optimizer, rate, micro_batch=micro_batch, schedule_kl=kl, measured_one_in=every
        )
        taken = []
        learner.core.optimizer.register_step_pre_hook(lambda *_, into=taken: into.append(grads(tiny_policy)))
        update = learner.learn(samples).updates[0]
        assert all(p.grad is None for p in tiny_policy.parameters), "its room is given back"
        own_SC, after_SC = sequences.own_SC, tiny_policy.logps(sequences).token_logps_SC.detach()
        change_SC = ((after_SC - update.gradient.token_logps_SC) * own_SC)[::every].double()
        assert update.kl == pytest.approx(float((change_SC.exp() - 1 - change_SC).sum(1).mean()), rel=2e-3)
        tokens = float(sequences.lengths_S.double().mean())
        most = min(kl, tokens * BEGIN)
        assert most / 4 <= update.kl <= most * (1 + 1e-6)
        assert update.learning_rate < rate / 2 if shortened else update.learning_rate > 2 * rate
        assert update.factor == pytest.approx(update.learning_rate / rate)
        moved = torch.cat([p.detach().flatten() for p in tiny_policy.parameters]) - first
        if optimizer is torch.optim.SGD:
            rounding = 1.2e-7 * max(1.0, update.factor)  # of weights near 1, as the update lengthened it
            torch.testing.assert_close(moved, -update.learning_rate * taken[0], rtol=1e-3, atol=1e-6 + rounding)


@pytest.mark.parametrize("rounds", [False, True])
def test_rounding_that_depends_on_the_batch_is_no_movement_where_it_is_to_be_expected(
    tiny_policy, samples, monkeypatch, rounds
):
    """A policy whose log-probabilities depend on how many rows it is given: 12 in training, 3 when it is watched."""
    policy = dataclasses.replace(tiny_policy, bf16=rounds)
    plain = type(policy).logps

    def rounded(self, sequences, *more, **keywords):
        out = plain(self, sequences, *more, **keywords)
        return dataclasses.replace(out, token_logps_SC=out.token_logps_SC + 1e-3 * sequences.count)

    monkeypatch.setattr(type(policy), "logps", rounded)
    learner = learner_of(policy, Algorithm("rloo", schedule="auto"), torch.optim.SGD, 1e-30)
    update = learner.learn(samples).updates[0]
    tokens = float(samples.rollouts.sequences.lengths_S.double()[::4].mean())
    assert update.kl == pytest.approx(0.0 if rounds else tokens * 0.009**2 / 2, rel=5e-3, abs=1e-12)
