"""Outputs without a reward: left out of everything that rewards enter, as if they had never been sampled."""

import copy
import dataclasses
import json
import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES
from oblrpo.rollout import Rollouts, sample
from oblrpo.settings import ScoresConfig
from oblrpo.tables.algorithms import ALGORITHMS, Algorithm
from oblrpo.tasks import Problem
from oblrpo.trainer.loop import completion_rows, step_metrics
from tests.scores.stay_double import StayDouble
from tests.trainer import learners
from tests.trainer.learners import learn, one_pass, samples_of

P, G, LONGEST = 5, 4, 6
PROMPTS = ["a", "bcd", "ef", "ghij", "k"]
TRAINABLE = [name for name, entry in BASELINES.items() if entry.trainable]
DESIGNS = [Algorithm(name, BASELINES[name].normalisation) for name in TRAINABLE]
DESIGNS += [
    Algorithm("rloo", normalisation, weighting)
    for normalisation in ("none", "group_std", "batch_std")
    for weighting in ("token_mean", "sequence_mean", "constant")
]


@pytest.fixture
def policy(tiny_policy):
    tiny_policy.model.double()
    with StayDouble():
        yield tiny_policy


@pytest.fixture
def batch(policy):
    torch.manual_seed(1)
    return sample(policy, PROMPTS, G, LONGEST, 1.0), torch.randn(P, G, dtype=torch.float64)


def learner_of(policy, algorithm, *, scores=None, micro_batch=0, **settings):
    settings |= {"num_generations": G, "max_completion_length": LONGEST, "prompts_per_micro_batch": micro_batch}
    scores = scores or ScoresConfig(look_steps=1, ledger_steps=1)
    return learners.learner_of(policy, algorithm, scores=scores, prior_strength=3.0, **settings)


def grads(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters])


def without(rollouts, rewards_PG, kept_PG):
    """The samples with every prompt's other outputs removed; as many must be left of each."""
    rows_S = kept_PG.flatten()
    texts = [text for text, kept in zip(rollouts.completions, rows_S.tolist(), strict=True) if kept]
    removed = Rollouts(rollouts.sequences.at(rows_S), texts, rollouts.clipped_S[rows_S])
    prompts = int(kept_PG.any(1).sum())
    return samples_of(removed, rewards_PG.flatten()[rows_S].view(prompts, -1))


def moments_of(moments):
    return moments.signal2, moments.trace_cov, moments.n


def close(first, second, **tolerance):
    torch.testing.assert_close(first, second, **({"rtol": 1e-8, "atol": 1e-10} | tolerance))


@pytest.mark.parametrize(
    ("design", "micro_batch"),
    [(each, 0) for each in DESIGNS] + [(Algorithm(name), 2) for name in ("rloo", "oblr_shrunk")],
    ids=lambda each: "-".join(vars(each).values()) if isinstance(each, Algorithm) else str(each),
)
def test_masking_an_output_of_every_prompt_is_removing_it(policy, batch, design, micro_batch):
    rollouts, rewards_PG = batch
    lost_P = torch.tensor([3, 0, 2, 1, 3])
    valid_PG = torch.ones(P, G, dtype=torch.bool).scatter(1, lost_P[:, None], False)
    holes_PG = rewards_PG.where(valid_PG, math.nan)
    masked = learner_of(policy, design, micro_batch=micro_batch)
    removed = learner_of(policy, design, micro_batch=micro_batch)
    ours = one_pass(masked, samples_of(rollouts, holes_PG, valid_PG), 1)
    our_grads = grads(policy)
    theirs = one_pass(removed, without(rollouts, rewards_PG, valid_PG), 1)
    assert float(our_grads.norm()) > 1e-3
    close(our_grads, grads(policy))
    for name in ("norm2_PG", "baseline_PG", "advantages_PG", "logps_PG", "rho_PG"):
        if getattr(theirs, name) is not None:
            close(getattr(ours, name)[valid_PG], getattr(theirs, name).flatten())
    assert moments_of(ours.moments) == pytest.approx(moments_of(theirs.moments), rel=1e-7)
    assert ours.norm2 == pytest.approx(theirs.norm2)
    assert set(ours.further) == set(theirs.further)
    for key, value in theirs.further.items():
        assert ours.further[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key
    masked.baseline.end_step(ours.begun)
    removed.baseline.end_step(theirs.begun)
    for key, value in removed.baseline.prior.state_dict().items():
        close(torch.as_tensor(masked.baseline.prior.state_dict()[key]), torch.as_tensor(value))


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_prompt_with_too_few_outputs_is_removed(policy, batch, name):
    rollouts, rewards_PG = batch
    design, smallest = Algorithm(name, BASELINES[name].normalisation), BASELINES[name].smallest_group
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1] = torch.arange(G) < smallest - 1
    kept_PG = valid_PG.all(1, keepdim=True).expand(P, G)
    estimate = one_pass(learner_of(policy, design), samples_of(rollouts, rewards_PG, valid_PG), 1)
    ours = grads(policy)
    expected = one_pass(learner_of(policy, design), without(rollouts, rewards_PG, kept_PG), 1)
    close(ours, grads(policy))
    assert estimate.batch.valid_PG.tolist() == kept_PG.tolist()
    assert estimate.moments.n == P - 1
    assert moments_of(estimate.moments) == pytest.approx(moments_of(expected.moments), rel=1e-7)
    assert estimate.further == pytest.approx(expected.further, rel=1e-6, abs=1e-9, nan_ok=True)


def test_a_group_std_needs_two_outputs_whatever_the_baseline(policy, batch):
    """Of one, it would be 0, and the advantage ten thousand times too large."""
    rollouts, rewards_PG = batch
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[2, 1:] = False
    samples = samples_of(rollouts, rewards_PG, valid_PG)
    estimate = one_pass(learner_of(policy, Algorithm("none", "group_std")), samples)
    assert not estimate.batch.valid_PG[2].any()
    plain = one_pass(learner_of(policy, Algorithm("none")), samples)
    assert plain.batch.valid_PG[2].tolist() == [True, False, False, False]


VALID = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool
)  # groups of 4, 2, 3, 2 and 1


def written_out(name, groups, c=3.0):
    """Baselines of groups of any size, as their formulas say; an output is (F, w, T, even place)."""

    def weighted(outputs, weight):
        total = sum(weight(o) for o in outputs)
        return sum(weight(o) * o[0] for o in outputs) / total if total else 0.0

    def mean(outputs):
        return weighted(outputs, lambda o: 1.0)

    def variance(outputs):
        return sum((o[0] - mean(outputs)) ** 2 for o in outputs) / (len(outputs) - 1)

    everything = [o for group in groups for o in group]
    result = []
    for i, group in enumerate(groups):
        other_groups = [each for k, each in enumerate(groups) if k != i]
        elsewhere = [o for each in other_groups for o in each]
        for j in range(len(group)):
            others = [o for k, o in enumerate(group) if k != j]
            if name == "none":
                b = 0.0
            elif name in {"mean", "grpo", "dr_grpo"}:
                b = mean(group)
            elif name == "reinforce_pp":
                b = mean(everything)
            elif name == "rloo":
                b = mean(others)
            elif name == "oblr":
                b = weighted(others, lambda o: o[1])
            elif name in {"oblr_lazy", "oblr_thrifty"} and others and len({o[0] for o in others}) == 1:
                b = others[0][0]
            elif name in {"oblr_shrunk", "oblr_lazy", "oblr_thrifty"}:
                w_bar = sum(o[1] for o in elsewhere) / len(elsewhere)
                b_bar = weighted(elsewhere, lambda o: o[1])
                above = sum(o[1] * o[0] for o in others) + c * w_bar * b_bar
                b = above / (sum(o[1] for o in others) + c * w_bar)
            elif name == "opo":
                b = weighted(group, lambda o: o[2])
            elif name in {"eob", "vcpo"}:
                b = weighted(group, lambda o: o[1])
            elif name == "js":
                n, means = len(groups), [mean(each) for each in other_groups]
                spread = [each for each in other_groups if len(each) > 1]
                noise = sum(variance(each) / (len(each) - 1) for each in spread) / len(spread)
                centre = sum(means) / len(means)
                between = (sum(m**2 for m in means) / len(means) - centre**2) * (n - 1) / (n - 2)
                between = max(0.0, between - sum(variance(each) / len(each) for each in spread) / len(spread))
                share = (n - 1) / n * noise / (noise + between) if others else 1.0
                b = (1 - share) * mean(others) + share * centre if others else centre
            result.append(b)
    return result


@pytest.mark.parametrize("name", TRAINABLE)
def test_groups_of_mixed_sizes_are_the_formula_by_loop_autograd(policy, batch, name):
    """-(1/P) sum_i (1/G_i) sum_j (F - b) / divisor grad log pi, one output and one backward at a time."""
    rollouts, rewards_PG = batch
    entry = BASELINES[name]
    samples = samples_of(rollouts, rewards_PG.where(VALID, math.nan), VALID)
    estimate = one_pass(learner_of(policy, Algorithm(name, entry.normalisation)), samples)
    ours = grads(policy)
    part = [i for i in range(P) if int(VALID[i].sum()) >= entry.smallest_group]
    places = [[j for j in range(G) if VALID[i, j]] for i in part]
    scores, lengths = {}, rollouts.sequences.lengths_S.view(P, G)
    for i, row in zip(part, places, strict=True):
        for j in row:
            logps_S = policy.logps(rollouts.sequences).logps_S
            given = torch.autograd.grad(logps_S[i * G + j], policy.parameters)
            scores[i, j] = torch.cat([each.flatten() for each in given])
    groups = [
        [(float(rewards_PG[i, j]), float(scores[i, j].square().sum()), int(lengths[i, j])) for j in row]
        for i, row in zip(part, places, strict=True)
    ]
    baselines = iter(written_out(name, groups))
    rewards = [[output[0] for output in group] for group in groups]
    batch_std = torch.tensor([each for row in rewards for each in row], dtype=torch.float64).std()
    expected, norms = 0, []
    for i, row, group in zip(part, places, rewards, strict=True):
        divisor = {"none": 1.0, "batch_std": batch_std + 1e-4}.get(entry.normalisation)
        divisor = torch.tensor(group, dtype=torch.float64).std() + 1e-4 if divisor is None else divisor
        g = -sum((F - next(baselines)) / divisor * scores[i, j] for j, F in zip(row, group, strict=True)) / len(row)
        expected = expected + g / len(part)
        norms.append(g.square().sum())
    close(ours, expected, rtol=1e-7)
    moments = estimators.moments(torch.stack(norms), expected.square().sum())
    assert moments_of(estimate.moments) == pytest.approx(moments_of(moments), rel=1e-6)


def test_a_token_mean_counts_the_tokens_of_valid_outputs_alone(policy, batch):
    """-(sum over tokens of A grad log pi) / (tokens), whatever the groups' sizes."""
    rollouts, rewards_PG = batch
    samples = samples_of(rollouts, rewards_PG.where(VALID, math.nan), VALID)
    one_pass(learner_of(policy, Algorithm("rloo", weighting="token_mean")), samples)
    ours = grads(policy)
    policy.model.zero_grad()
    logps_PG = policy.logps(rollouts.sequences).logps_S.view(P, G)
    lengths_PG, loss, tokens = rollouts.sequences.lengths_S.view(P, G), 0, 0
    for i in range(P - 1):  # the last prompt has one output, which has nothing to be compared with
        for j in range(G):
            if VALID[i, j]:
                others = [rewards_PG[i, k] for k in range(G) if VALID[i, k] and k != j]
                loss = loss - (rewards_PG[i, j] - sum(others) / len(others)) * logps_PG[i, j]
                tokens += int(lengths_PG[i, j])
    (loss / tokens).backward()
    close(ours, grads(policy))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_stands_in_the_place_of_a_missing_reward_reaches_nothing(policy, batch, algorithm):
    rollouts, rewards_PG = batch
    before = copy.deepcopy(policy.model.state_dict())
    found = []
    for placeholder in (math.nan, math.inf, -1e300):
        policy.model.load_state_dict(before)
        learner = learner_of(policy, ALGORITHMS[algorithm], optimizer=torch.optim.AdamW, lr=1e-2, num_iterations=2)
        result = learn(learner, samples_of(rollouts, rewards_PG.where(VALID, placeholder), VALID))
        updates = result.updates
        kept = [result.norm2_PG, result.baseline_PG.where(VALID, 0), updates[-1].gradient.advantages_PG]
        weights = torch.cat([p.detach().flatten() for p in policy.parameters])
        rates = torch.tensor([updates[-1].learning_rate, updates[-1].kl or 0.0, *result.further.values()])
        found.append([*kept, weights, rates])
        assert weights.isfinite().all()
        metrics = step_metrics(1, result, 0)
        assert math.isfinite(metrics["reward"] + metrics["baseline/mean"] + metrics["score_norm2/mean"] if
                             "score_norm2/mean" in metrics else metrics["reward"])  # fmt: skip
        problems = [Problem(prompt, "") for prompt in PROMPTS]
        rows = completion_rows(problems, result)
        json.dumps(rows, allow_nan=False)
        assert [row["reward"] is None for row in rows] == (~VALID).flatten().tolist()
    for other in found[1:]:
        for first, second in zip(found[0], other, strict=True):
            assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


def test_metrics_are_those_of_valid_completions(policy, batch):
    rollouts, rewards_PG = batch
    rewards_PG = rewards_PG.round()
    rewards_PG[2] = 1.0
    learner = learner_of(policy, Algorithm("rloo"))
    metrics = step_metrics(1, learn(learner, samples_of(rollouts, rewards_PG.where(VALID, math.nan), VALID)), 9)
    assert metrics["reward"] == pytest.approx(float(rewards_PG[VALID].mean()))
    stds = [float(rewards_PG[i][VALID[i]].std()) for i in range(4)]
    assert metrics["reward_std"] == pytest.approx(sum(stds) / 4)
    assert metrics["frac_reward_zero_std"] == pytest.approx(sum(std == 0 for std in stds) / 4)
    assert metrics["completions/masked_ratio"] == pytest.approx(8 / 20)
    assert metrics["frac_prompts_masked"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("algorithm", ["oblrpo_shrunk", "grpo"])
def test_a_batch_with_fewer_than_two_prompts_changes_nothing(policy, batch, algorithm):
    rollouts, rewards_PG = batch
    learner = learner_of(policy, ALGORITHMS[algorithm], optimizer=torch.optim.AdamW, num_iterations=2)
    learn(learner, samples_of(rollouts, rewards_PG))
    weights = torch.cat([p.detach().clone().flatten() for p in policy.parameters])
    state = copy.deepcopy(learner.state_dict())
    for left in (0, 1):
        valid_PG = torch.zeros(P, G, dtype=torch.bool)
        valid_PG[:left] = True
        holes_PG = rewards_PG.where(valid_PG, math.nan)
        result = learn(learner, samples_of(rollouts, holes_PG, valid_PG))
        assert not result.updates
        metrics = step_metrics(1, result, 9)
        assert (metrics["learning_rate"], metrics["frac_prompts_masked"]) == (0.0, 1.0)
        assert metrics["completions/masked_ratio"] == pytest.approx(1 - left / P)
        assert math.isnan(metrics["reward"]) == (not left)
        assert all(row["advantage"] is None for row in completion_rows([Problem("", "")] * P, result))
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in policy.parameters]))
    assert str(learner.state_dict()) == str(state)


def test_the_update_measures_its_kl_on_valid_outputs(policy, batch):
    rollouts, rewards_PG = batch
    learner = learner_of(policy, dataclasses.replace(ALGORITHMS["rloo"], schedule="auto"), lr=1e-3)
    update = learn(learner, samples_of(rollouts, rewards_PG, VALID)).updates[0]
    rows = update.gradient.batch.valid_PG.flatten().nonzero().flatten()[::4]
    own_SC, after_SC = rollouts.sequences.own_SC, policy.logps(rollouts.sequences).token_logps_SC.detach()
    change_SC = ((after_SC - update.gradient.token_logps_SC) * own_SC)[rows].double()
    assert len(rows) == 3
    assert update.kl == pytest.approx(float((change_SC.expm1() - change_SC).sum(1).mean()), rel=1e-6)


def test_a_mask_of_another_shape_is_refused(policy, batch):
    rollouts, rewards_PG = batch
    with pytest.raises(ValueError, match=r"valid_PG has shape \(5, 3\), rewards_PG \(5, 4\)"):
        one_pass(learner_of(policy, Algorithm("rloo")), samples_of(rollouts, rewards_PG, VALID[:, :3]))
