import dataclasses
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.errors import DivergedError, InputError
from oblrpo.estimators.measured_rate import BEGIN
from oblrpo.rollout import sample
from oblrpo.scores import ScoreTape, oracle
from oblrpo.settings import ScoresConfig
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from tests.scores.stay_double import StayDouble
from tests.trainer import learners
from tests.trainer.learners import drawn, learn, looking_at, one_pass, samples_of

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


@pytest.fixture
def double(tiny_policy):
    """In float64, where norms and softmaxes of transformers go down to float32 without help."""
    tiny_policy.model.double()
    with StayDouble():
        yield tiny_policy


def taught(learner):
    """The learner with a proxy that has learned from an earlier batch, and does not predict what it does at first."""
    torch.manual_seed(7)
    samples = samples_of(sample(learner.policy, ["kl", "m", "nop"], G, LONGEST, 1.0), torch.randn(3, G))
    features = drawn(learner, samples).rollouts.features
    norm2_S = oracle.norm2(learner.policy.model, learner.policy.logps(samples.rollouts.sequences).logps_S)
    learner.policy.model.zero_grad()
    learner.baseline.calibrated.observe(features, norm2_S, G)
    return learner


@pytest.mark.parametrize("looked", [range(P), (0, 2), ()], ids=["at all", "at two", "at none"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_is_the_formula(double, samples, algorithm, looked):
    """-(1/PG) sum A grad log pi with everything recomputed by hand and by loop autograd."""
    policy, sequences, rewards_PG = double, samples.rollouts.sequences, samples.rewards_PG.double()
    samples, looked = drawn(learner_of(policy), samples_of(samples.rollouts, rewards_PG)), list(looked)
    learner = looking_at(taught(learner_of(policy, algorithm)), looked)
    estimate = one_pass(learner, samples)
    ours = grads(policy)
    policy.model.zero_grad()
    norm2_PG = oracle.norm2(policy.model, policy.logps(sequences).logps_S).view(P, G)
    proxy_PG = learner.baseline.calibrated.predict(samples.rollouts.features).view(P, G)
    weight_PG = proxy_PG.clone()
    if len(looked) == P:  # else exact ones beside the proxy's would weigh as much as its level is off
        weight_PG = norm2_PG
    assert (proxy_PG / norm2_PG).log().abs().min() > 1e-3  # no exact norm is taken for the proxy's, or the reverse
    out = policy.logps(sequences)
    lengths_PG, mask_SC = sequences.lengths_S.view(P, G), sequences.own_SC
    table = ALGORITHMS[algorithm]
    inputs = {"norm2_PG": weight_PG, "length_PG": lengths_PG, "token_mask_PGT": mask_SC.view(P, G, -1)}
    baseline = estimators.baseline(table.baseline, rewards_PG, **inputs)
    divisor_PG = {"grpo": rewards_PG.std(1, keepdim=True) + 1e-4, "reinforce_pp": rewards_PG.std() + 1e-4}.get(
        algorithm, 1
    )
    ones_PG = torch.ones(P, G, dtype=torch.float64)
    weighting_PG = {"grpo": 1 / lengths_PG.double(), "dr_grpo": ones_PG / LONGEST}.get(algorithm, ones_PG)
    a_PG = (rewards_PG - baseline) / divisor_PG * weighting_PG
    group_norm2_P = oracle.accumulate(policy.model, out.logps_S, (-a_PG / (P * G)).flatten(), G) * P**2
    expected = grads(policy)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10 * float(expected.norm()))
    assert estimate.norm2 == pytest.approx(float(expected.square().sum()), rel=1e-9)
    torch.testing.assert_close(estimate.advantages_PG, rewards_PG - baseline, rtol=1e-9, atol=1e-12)
    if looked:
        torch.testing.assert_close(estimate.norm2_PG[looked], norm2_PG[looked], rtol=1e-8, atol=0)
        assert estimate.norm2_PG.isfinite().sum() == len(looked) * G
    # Signal and noise: of exact squared norms, if all were looked at; else of every second prompt and the others.
    if len(looked) == P:
        moments = estimators.moments(group_norm2_P, expected.square().sum())
        assert estimate.moments.trace_cov == pytest.approx(moments.trace_cov, rel=1e-8)
        assert estimate.moments.signal2 == pytest.approx(moments.signal2, rel=1e-7, abs=1e-8 * moments.trace_cov)
        return
    policy.model.zero_grad()
    first_P1 = torch.tensor([True, False] * (P // 2))[:, None]
    oracle.accumulate(policy.model, out.logps_S, torch.where(first_P1, -a_PG / (P * G), 0).flatten(), G)
    first, rounding = grads(policy), 2**-8  # what is kept of the first half is in bfloat16
    second = expected - first
    assert estimate.gradient.halves == (P // 2, P // 2)
    assert abs(estimate.gradient.inner2 - float(first @ second)) < rounding * float(first.norm() * second.norm())
    assert estimate.moments == estimators.moments_of_halves(estimate.gradient.inner2, estimate.norm2, (P // 2, P // 2))


PLAIN = {
    "reinforce": lambda F_PG, lengths_PG: F_PG,
    "rloo": lambda F_PG, lengths_PG: F_PG - (F_PG.sum(1, keepdim=True) - F_PG) / (G - 1),
    "grpo": lambda F_PG, lengths_PG: (F_PG - F_PG.mean(1, keepdim=True)) / (F_PG.std(1, keepdim=True) + 1e-4)
    / lengths_PG,
}  # fmt: skip


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("look_steps", [0, 1])
@pytest.mark.parametrize("algorithm", PLAIN)
def test_algorithms_without_weights_are_their_plain_loss(double, samples, algorithm, look_steps, micro_batch):
    """One forward of all outputs and one backward of -mean(A log pi), whether there was a look or not."""
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0], [0.0] * 3, [1.0] * 3, [0.3, 0.6, 0.9]], dtype=torch.float64)
    scores = ScoresConfig(look_steps=look_steps)
    learner = learner_of(double, algorithm, micro_batch=micro_batch, scores=scores)
    one_pass(learner, samples_of(samples.rollouts, rewards_PG))
    ours = grads(double)
    double.model.zero_grad()
    sequences = samples.rollouts.sequences
    A_PG = PLAIN[algorithm](rewards_PG, sequences.lengths_S.view(P, G))
    (-(A_PG * double.logps(sequences).logps_S.view(P, G)).mean()).backward()
    expected = grads(double)
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10 * float(expected.norm()))


def test_a_step_takes_its_weights_from_the_past_and_then_learns(tiny_policy, samples):
    """A look that is not at all prompts weighs nothing, and teaches the proxy for the steps after it."""
    learner = looking_at(learner_of(tiny_policy, lr=0.0), [0, 2])
    predicted_PG = [learner.baseline.calibrated.predict(drawn(learner, samples).rollouts.features).view(P, G)]
    first = learn(learner, samples)
    torch.testing.assert_close(
        first.baseline_PG, estimators.baseline("oblr", samples.rewards_PG, norm2_PG=predicted_PG[0])
    )
    predicted_PG.append(learner.baseline.calibrated.predict(drawn(learner, samples).rollouts.features).view(P, G))
    assert learner.baseline.calibrated.observed == 2 * G
    assert (predicted_PG[1] / predicted_PG[0]).log().abs().min() > 1e-3
    second = learn(learner, samples)
    torch.testing.assert_close(
        second.baseline_PG, estimators.baseline("oblr", samples.rewards_PG, norm2_PG=predicted_PG[1])
    )
    assert {"score_norm2/agreement_length", "score_norm2/agreement_logit", "score_norm2/agreement_calibrated"} <= set(
        second.further
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("settings", "forwards"), [({"micro_batch": each}, -(-P // each)) for each in (1, 2, 3)]
    + [({"tokens_per_micro_batch": tokens}, least) for tokens, least in ((1, P * G), (60, 2))],
)  # fmt: skip
def test_micro_batches_change_nothing(tiny_policy, samples, algorithm, settings, forwards):
    """Outputs go through the model in another order; what is said of each is in its place."""
    samples = drawn(learner_of(tiny_policy), samples)
    whole = one_pass(learner_of(tiny_policy, algorithm), samples)
    expected = grads(tiny_policy)
    learner = learner_of(tiny_policy, algorithm, **settings)
    assert len(learner.micro_batches.of(samples.rollouts.sequences, 1)) >= forwards
    split = one_pass(learner, samples)
    torch.testing.assert_close(grads(tiny_policy), expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))
    for name, first in vars(whole).items():
        second = getattr(split, name)
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert split.moments.trace_cov == pytest.approx(whole.moments.trace_cov, rel=1e-4)


def test_off_policy_the_score_carries_the_importance_weight(tiny_policy, samples):
    """grad of the mean of rho A with rho = pi / pi_old; the baseline is that of the batch, whatever rho."""
    sequences, rewards_PG = samples.rollouts.sequences, samples.rewards_PG
    own_SC, token_logps_SC = sequences.own_SC, tiny_policy.logps(sequences).token_logps_SC.detach()
    old_token_logps_SC = token_logps_SC + 0.3 * torch.randn_like(token_logps_SC)
    old_logps_PG = (old_token_logps_SC * own_SC).sum(1).view(P, G)
    one_pass(learner_of(tiny_policy), samples, old_token_logps_SC=old_token_logps_SC)
    ours = grads(tiny_policy)
    tiny_policy.model.zero_grad()
    norm2_PG = oracle.norm2(tiny_policy.model, tiny_policy.logps(sequences).logps_S).view(P, G)
    rho_PG = (tiny_policy.logps(sequences).logps_S.view(P, G) - old_logps_PG).exp()
    baseline_PG = estimators.baseline("oblr", rewards_PG, norm2_PG=norm2_PG)
    (-(rho_PG * (rewards_PG - baseline_PG)).mean()).backward()
    expected = grads(tiny_policy)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))


def test_several_updates_use_the_first_log_probabilities_as_old(tiny_policy, samples):
    learner = learner_of(tiny_policy, num_iterations=3, lr=0.01, schedule_floor=1.0)
    old, gradient = [], learner.gradient
    learner.gradient = lambda *given: old.append(given[-1].old_token_logps_SC) or gradient(*given)
    updates = learn(learner, samples).updates
    assert old[0] is None
    assert old[1] is old[2] is updates[0].gradient.token_logps_SC
    assert ((updates[2].gradient.token_logps_SC - old[2]).exp() - 1).abs().max() > 1e-3


def test_the_update_has_the_rate_that_is_reported(tiny_policy, samples):
    learner = learner_of(tiny_policy, lr=0.5)
    before = torch.cat([p.detach().clone().flatten() for p in tiny_policy.parameters])
    taken = one_pass(learner, samples)
    gradient = grads(tiny_policy)
    update = learner.update(taken.gradient, taken.moments)
    after = torch.cat([p.detach().flatten() for p in tiny_policy.parameters])
    assert update.learning_rate == pytest.approx(0.5 * update.factor)
    torch.testing.assert_close(after, before - update.learning_rate * gradient)


def test_the_gradient_is_measured_before_clipping(tiny_policy, samples):
    learner = learner_of(tiny_policy, "rloo", max_grad_norm=1e-3, lr=1.0)
    before = torch.cat([p.detach().clone().flatten() for p in tiny_policy.parameters])
    update = learn(learner, samples).updates[0]
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
        learn(learner_of(tiny_policy, algorithm), samples, step)


def test_scores_that_overflow_are_skipped(tiny_policy, samples, monkeypatch):
    monkeypatch.setattr(ScoreTape, "gram", lambda *_: torch.full((P, G, G), math.inf))
    result = learn(learner_of(tiny_policy), samples)
    assert (result.updates, result.skipped) == ((), "score norm")


def test_a_gradient_that_overflows_is_skipped(tiny_policy, samples):
    """Its norm is finite in float64, in which it is summed, and not in float32, in which optimizers square it."""
    result = learn(learner_of(tiny_policy), dataclasses.replace(samples, rewards_PG=samples.rewards_PG * 1e25))
    assert (result.updates, result.skipped) == ((), "gradient")


def test_weights_that_overflow_have_diverged(tiny_policy, samples):
    """Nothing of before is kept to go back to: the run ends, and the checkpoint before is whole."""
    huge = dataclasses.replace(samples, rewards_PG=samples.rewards_PG * 1e10)
    with pytest.raises(DivergedError, match="a weight is NaN or infinite; lower learning_rate"):
        learn(learner_of(tiny_policy, "rloo", lr=3e38), huge)


def test_what_speaks_of_nan_need_not_have_diverged(tiny_policy, samples):
    rollouts = samples.rollouts
    nan_SC = torch.full_like(rollouts.sequences.completion_SC, math.nan, dtype=torch.float32)
    broken = dataclasses.replace(samples, rollouts=dataclasses.replace(rollouts, sampler_logps_SC=nan_SC))
    with pytest.raises(InputError, match="the sampler reports an invalid log-probability") as caught:
        learn(learner_of(tiny_policy), broken)
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
        learn(learner, samples)
    gain_PG = (tiny_policy.logps(samples.rollouts.sequences).logps_S - before).view(2, 4)
    assert gain_PG[rewards_PG == 1].min() > gain_PG[rewards_PG == 0].mean()


def test_later_updates_on_a_batch_have_not_seen_it(tiny_policy, samples):
    learner = learner_of(tiny_policy, Algorithm("oblr_shrunk"), num_iterations=2, lr=0.0, micro_batch=1)
    updates = learn(learner, samples).updates
    torch.testing.assert_close(updates[0].gradient.advantages_PG, updates[1].gradient.advantages_PG)
    once = learner_of(tiny_policy, Algorithm("oblr_shrunk"), lr=0.0, micro_batch=1)
    learn(once, samples)
    for key, value in once.baseline.prior.state_dict().items():
        torch.testing.assert_close(learner.baseline.prior.state_dict()[key], value)
    again = learn(learner, samples).updates[0]
    assert (again.gradient.advantages_PG - updates[0].gradient.advantages_PG).abs().max() > 1e-3


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
        learner.optimizer.register_step_pre_hook(lambda *_, into=taken: into.append(grads(tiny_policy)))
        update = learn(learner, samples).updates[0]
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
    """A policy whose log-probabilities depend on how many rows it is given: 6 in training, 3 when it is watched."""
    policy = dataclasses.replace(tiny_policy, bf16=rounds)
    plain = type(policy).logps

    def rounded(self, sequences, *more, **keywords):
        out = plain(self, sequences, *more, **keywords)
        return dataclasses.replace(out, token_logps_SC=out.token_logps_SC + 1e-3 * sequences.count)

    monkeypatch.setattr(type(policy), "logps", rounded)
    learner = learner_of(policy, Algorithm("rloo", schedule="auto"), torch.optim.SGD, 1e-30)
    update = learn(learner, samples).updates[0]
    tokens = float(samples.rollouts.sequences.lengths_S.double()[::4].mean())
    assert update.kl == pytest.approx(0.0 if rounds else tokens * 0.003**2 / 2, rel=5e-3, abs=1e-12)
