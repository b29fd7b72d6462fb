"""Everything that a step computes is over the policy's own tokens, whatever a tool has said before, between or after.

Against one backward a completion in float64, own tokens alone. Every check must fail on rows whose words of tools are
taken for the policy's own (`must_notice`).
"""

import itertools
from dataclasses import replace

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, NORMALISATIONS, WEIGHTINGS, moments, moments_of_halves
from oblrpo.memory import peak_bytes
from oblrpo.policy import Policy, make_policy
from oblrpo.policy.adapters import add_adapter
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rollout import join
from oblrpo.scores import PROXIES
from oblrpo.settings import PolicyConfig, ScoresConfig
from oblrpo.step.flow import clip_metrics
from oblrpo.step.look import look
from oblrpo.tables.algorithms import ALGORITHMS, RATIOS, Algorithm
from oblrpo.tasks import Problem
from oblrpo.trainer.loop import completion_rows, step_metrics, text_metrics
from tests.scores.stay_double import StayDouble
from tests.step.test_ratios import bounds_of, published
from tests.step.turns import (
    EMPTY,
    LONGEST,
    PROMPTS,
    G,
    P,
    Turns,
    close,
    features_of,
    grads,
    in_columns,
    must_notice,
    rows_of,
    scores,
    scores_of,
    truth_of,
)
from tests.trainer import learners
from tests.trainer.learners import learn, one_pass, samples_of

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = ["plain", "lora", "checkpointed"]
IN_BETWEEN = [0.0, -7.5, 3.0, float("nan")]
"""What a sampler may report where a tool has spoken."""


@pytest.fixture
def turns(request):
    """A tiny policy in float64 with its rows."""
    torch.manual_seed(0)
    kind = getattr(request, "param", "plain")
    config = PolicyConfig(model_args=SIZES, device="cpu", gradient_checkpointing=kind == "checkpointed")
    policy = make_policy(config)
    if kind == "lora":
        policy = replace(policy, model=add_adapter(policy.model, replace(config, lora={"r": 2})).eval())
    policy.model.double()
    with torch.no_grad():  # new adapters begin at 0, and half of them would have no score
        for parameter in policy.parameters:
            parameter += 0.05 * torch.randn_like(parameter)
    with StayDouble():
        yield Turns(policy, rows_of(policy))


every_kind = pytest.mark.parametrize("turns", KINDS, indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it


def learner_of(policy, algorithm, **settings):
    settings |= {"num_generations": G, "max_completion_length": LONGEST}
    return learners.learner_of(policy, algorithm, **settings)


def rewards(seed=2):
    return torch.randn(P, G, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lengths_of(rows):
    return torch.tensor([len(row.own) for row in rows], dtype=torch.float64).view(P, G)


def moved(policy, size=0.05, seed=3):
    """Move the weights, as updates would have."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def baseline_of(name, rewards_PG, rows, score_SN, valid_PG=None):
    norm2_PG, length_PG = score_SN.square().sum(1).view(P, G), lengths_of(rows)
    return estimators.baseline(name, rewards_PG, norm2_PG=norm2_PG, length_PG=length_PG, valid_PG=valid_PG)


@every_kind
@pytest.mark.parametrize("micro_batches", [MicroBatches(), MicroBatches(2), MicroBatches(tokens=60)])
@must_notice
def test_scores_of_a_look(turns, micro_batches):
    seen = look(turns.policy, turns.rollouts(0.8).sequences, G, 0.8, micro_batches)
    truth = truth_of(turns.policy, turns.rows, 0.8)
    score_PGN = scores_of(turns.policy, turns.rows, 0.8).unflatten(0, (P, G))
    close(seen.gram_PGG, score_PGN @ score_PGN.mT)
    close(seen.logps.logps_S, truth.logps_S.detach())
    assert not seen.norm2_PG.flatten()[EMPTY].any()
    for name, values in (("token_logps_SC", truth.logps), ("entropy_SC", truth.entropies)):
        close(getattr(seen.logps, name), in_columns(turns.rows, values))


@must_notice
def test_pairs_across_prompts(turns):
    score_SN = scores_of(turns.policy, turns.rows)
    seen = look(turns.policy, turns.rollouts().sequences, G, 1.0, MicroBatches(), all_pairs=True)
    close(seen.pairs_SS, score_SN @ score_SN.T)


DESIGNS = {name: row for name, row in ALGORITHMS.items() if name != "oblrpo_thrifty"}
DESIGNS |= {each: Algorithm(each) for each in BASELINES if BASELINES[each].trainable and each not in DESIGNS}
DESIGNS |= {each: Algorithm("rloo", weighting=each) for each in WEIGHTINGS}


def check_gradient(turns, design, **settings):
    rewards_PG, rows, policy = rewards(), turns.rows, turns.policy
    found = one_pass(learner_of(policy, design, **settings), samples_of(turns.rollouts(), rewards_PG))
    ours, score_SN = grads(policy), scores_of(policy, rows)
    baseline_PG = baseline_of(design.baseline, rewards_PG, rows, score_SN)
    close(found.baseline_PG + 1, baseline_PG + 1)  # some are 0
    factor_PG = WEIGHTINGS[design.weighting](lengths_of(rows), LONGEST)
    scale_PG = factor_PG / NORMALISATIONS[design.normalisation](rewards_PG)
    weighted_SN = (scale_PG * (rewards_PG - baseline_PG)).flatten()[:, None] * score_SN
    close(ours, -weighted_SN.mean(0))
    return found, weighted_SN


@pytest.mark.parametrize("name", DESIGNS)
@must_notice
def test_the_gradient_of_every_algorithm_baseline_and_weighting(turns, name):
    check_gradient(turns, DESIGNS[name])


@every_kind
@pytest.mark.parametrize("settings", [{}, {"prompts_per_micro_batch": 1}, {"tokens_per_micro_batch": 40}])
@must_notice
def test_the_gradient_in_micro_batches_with_signal_and_noise_by_prompt(turns, settings):
    found, weighted_SN = check_gradient(turns, ALGORITHMS["oblrpo_thrifty"], **settings)
    g_PN = weighted_SN.view(P, G, -1).mean(1)
    wanted = moments(g_PN.square().sum(1), float(g_PN.mean(0).square().sum()))
    assert found.moments.n == P
    assert found.moments.signal2 == pytest.approx(wanted.signal2, rel=1e-8)
    assert found.moments.trace_cov == pytest.approx(wanted.trace_cov, rel=1e-8)


@must_notice
def test_signal_and_noise_of_halves(turns):
    """The first half's gradient is held in bfloat16."""
    rewards_PG, policy = rewards(), turns.policy
    found = one_pass(learner_of(policy, "rloo"), samples_of(turns.rollouts(), rewards_PG), 0)
    score_SN = scores_of(policy, turns.rows)
    a_PG = rewards_PG - baseline_of("rloo", rewards_PG, turns.rows, score_SN)
    g_PN = (a_PG.flatten()[:, None] * score_SN).view(P, G, -1).mean(1) / P
    first, other = g_PN[::2].sum(0), g_PN[1::2].sum(0)
    wanted = moments_of_halves(float(first @ other), float((first + other).square().sum()), (2, 2))
    assert found.moments.trace_cov == pytest.approx(wanted.trace_cov, rel=1e-3)
    assert found.moments.signal2 == pytest.approx(wanted.signal2, rel=1e-2)


@every_kind
@must_notice
def test_what_is_skipped_and_what_that_saves(turns):
    """Rows of advantage 0 and rows without a token of their own; what goes through the model is all of a row."""
    rewards_PG, policy, rows = rewards(), turns.policy, turns.rows
    rewards_PG[[0, 2]] = rewards_PG[[0, 2], :1].expand(2, G).clone()
    learner = learner_of(policy, "rloo", scores=ScoresConfig(look_steps=0, ledger_steps=0), lr=0.0)
    samples, _ = learners.drawn(learner, samples_of(turns.rollouts(), rewards_PG)), policy.head
    gradients, shapes, update = [], [], learner.update
    learner.update = lambda *given: gradients.append(grads(policy)) or update(*given)
    logps = Policy.logps

    def counted(self, part, *more):
        shapes.append((part.count, int(part.mask_ST.sum())))
        return logps(self, part, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Policy, "logps", counted)
        result = learner.learn(samples, 0)
    trained = [row for row in range(P * G) if row // G not in {0, 2} and row not in EMPTY]
    tokens = sum(len(rows[row].prompt) + len(rows[row].words) for row in trained)
    assert tuple(map(sum, zip(*shapes, strict=True))) == (len(trained), tokens)
    gradient = result.updates[0].gradient
    assert gradient.trained_S.nonzero().flatten().tolist() == trained
    assert step_metrics(1, result, 0)["completions/trained_ratio"] == pytest.approx(len(trained) / (P * G))
    assert gradient.token_logps_SC[EMPTY].isfinite().all()
    score_SN = scores_of(policy, rows)
    a_PG = rewards_PG - baseline_of("rloo", rewards_PG, rows, score_SN)
    close(gradients[0], -(a_PG.flatten()[:, None] * score_SN).mean(0))


@every_kind
@must_notice
def test_the_penalty(turns):
    learner, policy, rewards_PG = learner_of(turns.policy, "rloo", beta=0.5), turns.policy, rewards()
    sequences, before_S = turns.rollouts().sequences, truth_of(policy, turns.rows).logps_S.detach()
    assert not learner.reference.penalised(sequences, rewards_PG)[1].any()
    moved(policy)
    charged_PG, kl_PG = learner.reference.penalised(sequences, rewards_PG)
    log_ratio_S = truth_of(policy, turns.rows).logps_S.detach() - before_S
    close(kl_PG.flatten(), log_ratio_S)
    close(charged_PG, rewards_PG - 0.5 * log_ratio_S.view(P, G))
    assert torch.equal(charged_PG.flatten()[EMPTY], rewards_PG.flatten()[EMPTY])
    result = replace(learn(learner, samples_of(turns.rollouts(), charged_PG)), kl_PG=kl_PG)
    own = sum(len(row.own) for row in turns.rows)
    assert step_metrics(1, result, 0)["kl"] == pytest.approx(float(log_ratio_S.sum()) / own)


@every_kind
@pytest.mark.parametrize("skipped", [[], [0, 1]])
@must_notice
def test_how_far_an_update_goes(turns, skipped):
    """By token, for rows that went through the model for the gradient, and for those that did not."""
    rewards_PG, policy, rows = rewards(), turns.policy, turns.rows
    rewards_PG[skipped] = 0.5
    learner = learner_of(policy, "rloo", measured_one_in=1)
    gradient = one_pass(learner, samples_of(turns.rollouts(), rewards_PG)).gradient
    change, before = learner.movement.watch(gradient), truth_of(policy, rows).logps
    before_SC = in_columns(rows, before)
    moved(policy)
    after_SC = in_columns(rows, truth_of(policy, rows).logps)
    close(change(), after_SC - before_SC)


@pytest.mark.parametrize("schedule", ["auto", "kl"])
@must_notice
def test_the_measured_rate(turns, schedule):
    """The KL that a step takes is that of the policy's own tokens, a mean over outputs, those without any too."""
    policy, rows, rewards_PG = turns.policy, turns.rows, rewards()
    algorithm = replace(ALGORITHMS["oblrpo_thrifty"], schedule=schedule)
    learner = learner_of(policy, algorithm, lr=0.02, measured_one_in=1)
    assert learner.batch(samples_of(turns.rollouts(), rewards_PG)).mean_length == float(lengths_of(rows).mean())
    for number in (1, 2, 3):
        before_SC = in_columns(rows, truth_of(policy, rows).logps)
        [update] = learn(learner, samples_of(turns.rollouts(), rewards_PG), number).updates
        change_SC = in_columns(rows, truth_of(policy, rows).logps) - before_SC
        kl = float((change_SC.expm1() - change_SC).sum() / (P * G))
        assert update.kl == pytest.approx(kl, rel=1e-6)


def packed(values):
    """Own tokens side by side, without anything in between, (S, n), and which there are."""
    mask_SN = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each)) for each in values], batch_first=True)
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True), mask_SN.double()


def has_own(rows):
    return torch.tensor([bool(row.own) for row in rows])


@pytest.mark.parametrize("weighting", ["sequence", "sequence_mean"])
@pytest.mark.parametrize("name", RATIOS)
@must_notice
def test_several_updates_under_every_ratio(turns, name, weighting):
    """The gradient of the published loss, over rows that have tokens of their own; the old policy's are those alone."""
    policy, rows, rewards_PG = turns.policy, turns.rows, rewards()
    generator = torch.Generator().manual_seed(4)
    old = [
        logps.detach() + 0.3 * torch.randn(logps.shape, generator=generator, dtype=torch.float64)
        for logps in truth_of(policy, rows).logps
    ]
    settings = {"num_iterations": 2, **bounds_of(name)}
    learner = learner_of(policy, Algorithm("rloo", weighting=weighting, ratio=name), **settings)
    score_SN = scores_of(policy, rows)
    baseline_PG = baseline_of("rloo", rewards_PG, rows, score_SN)
    old_SC = in_columns(rows, old, float("nan"))
    if turns.counted:
        old_SC = old_SC.nan_to_num(-1.0)
    found = one_pass(learner, samples_of(turns.rollouts(), rewards_PG), 0, old_SC, baseline_PG)
    ours = grads(policy)
    policy.model.zero_grad()
    own_S = has_own(rows)
    (now_SN, mask_SN), (old_SN, _) = packed(truth_of(policy, rows).logps), packed(old)
    A_S1, bounds = (rewards_PG - baseline_PG).flatten()[:, None], learner.ratio.bounds
    clipped = estimators.ratio_weights(learner.ratio, now_SN, old_SN, mask_SN, A_S1[:, 0]).clipped
    if name == "cispo":  # a share of those that are pushed up
        clipped = clipped & (A_S1 > 0)
    share = (clipped * mask_SN).sum() / mask_SN.sum() if learner.ratio.by_token else clipped.double().mean()
    shares = clip_metrics(found.gradient, learner.ratio)
    for key in {"clip_ratio/region_mean", "cispo_clip_ratio"} & {*shares}:
        assert shares[key] == pytest.approx(float(share))
    given = (each[own_S] for each in (now_SN, old_SN, mask_SN, A_S1))
    loss_S = published(name, *given, bounds.low, bounds.high)
    if weighting == "sequence_mean":
        loss_S = loss_S / mask_SN[own_S].sum(1)
    (loss_S.sum() / (P * G)).backward()
    close(ours, grads(policy))


@every_kind
@pytest.mark.parametrize("in_between", IN_BETWEEN)
@must_notice
def test_a_sampler_that_differs(turns, in_between):
    """Its importance weights are of own tokens, whatever it reports where a tool has spoken."""
    policy, rows, rewards_PG = turns.policy, turns.rows, rewards()
    truth, generator = truth_of(policy, rows), torch.Generator().manual_seed(5)
    told = [(each.detach() - 0.1 * torch.rand(each.shape, generator=generator).double()) for each in truth.logps]
    mu_SC = in_columns(rows, told, in_between)
    rollouts = replace(turns.rollouts(), sampler_logps_SC=mu_SC)
    scores = ScoresConfig(look_steps=1, ledger_steps=1)
    learner = learner_of(policy, "rloo", sampler_correction="truncated:1.3", scores=scores)
    learner.looks.exact = True
    found = one_pass(learner, samples_of(rollouts, rewards_PG))
    log_ratio_S = truth.logps_S.detach() - torch.stack([each.sum() for each in told])
    rho_S, score_SN = log_ratio_S.exp().clamp(max=1.3), scores_of(policy, rows)
    close(found.rho_PG.flatten(), rho_S)
    assert 0 < int((rho_S == 1.3).sum()) < P * G
    a_PG = rewards_PG - baseline_of("rloo", rewards_PG, rows, score_SN)
    g_PN = ((a_PG.flatten() * rho_S)[:, None] * score_SN).view(P, G, -1).mean(1)
    close(grads(policy), -g_PN.mean(0))
    assert found.further["variance/rloo"] == pytest.approx(float(g_PN.var(0).sum()) / P, rel=1e-6)
    apart = torch.cat([(now - then).abs() for now, then in zip(truth.logps, told, strict=True)]).detach()
    assert found.further["sampling/sampling_logp_difference/mean"] == pytest.approx(float(apart.mean()))
    own_S = has_own(rows)
    apart_S = log_ratio_S[own_S].abs()
    assert found.further["sampling/sequence_logp_difference/mean"] == pytest.approx(float(apart_S.mean()))
    ess = rho_S[own_S].sum() ** 2 / (len(apart_S) * rho_S[own_S].square().sum())
    assert found.gradient.ess_ratio == pytest.approx(float(ess))


@pytest.mark.parametrize("name", BASELINES)
@must_notice
def test_the_ledger(turns, name):
    policy, rows, rewards_PG = turns.policy, turns.rows, rewards()
    learner = learner_of(policy, "rloo", scores=ScoresConfig(look_steps=1, ledger_steps=1))
    learner.looks.exact = True
    found = one_pass(learner, samples_of(turns.rollouts(), rewards_PG)).further
    truth, row = truth_of(policy, rows), BASELINES[name]
    score_SN = scores_of(policy, rows)
    divisor_PG = NORMALISATIONS[row.normalisation](rewards_PG)
    if row.by_token:
        mask_PGT = in_columns(rows, [torch.ones(len(each.own)) for each in rows]).view(P, G, -1)
        norms_PGT = in_columns(rows, truth.logit_norms).view(P, G, -1)
        b_PGT = estimators.baseline(name, rewards_PG, token_mask_PGT=mask_PGT, logit_norm2_PGT=norms_PGT)
        a_SC = (rewards_PG[..., None] - b_PGT).flatten(0, 1)
        weighted = (logps @ a_C[each.own] for logps, a_C, each in zip(truth.logps, a_SC, rows, strict=True))
        vectors_SN = scores(policy, torch.stack([*weighted]))
    else:
        b_PG = baseline_of(name, rewards_PG, rows, score_SN)
        vectors_SN = (rewards_PG - b_PG).flatten()[:, None] * score_SN
    g_PN = (vectors_SN / divisor_PG.flatten()[:, None]).view(P, G, -1).mean(1)
    variance = float(g_PN.var(0).sum()) / P
    assert found[f"variance/{name}"] == pytest.approx(variance, rel=1e-6)
    assert found[f"signal2/{name}"] == pytest.approx(float(g_PN.mean(0).square().sum()) - variance, rel=1e-5)


@must_notice
def test_features_and_proxies(turns):
    """Those of a forward, and those of a sampler that reports log-probabilities alone."""
    policy, rows = turns.policy, turns.rows
    sequences, truth = turns.rollouts().sequences, truth_of(policy, rows)
    wanted, found = features_of(truth), policy.logps(sequences).features
    for name, values in vars(wanted).items():
        close(getattr(found, name), values)
    logps_SC = in_columns(rows, truth.logps, float("nan"))
    reported = type(found).of_logps(logps_SC.nan_to_num(1.0), sequences.own_SC)
    close(reported.logit_norm2_S, torch.stack([each.expm1().square().sum() for each in truth.logps]).detach())
    learner = learner_of(policy, "oblrpo")
    score_SN = scores_of(policy, rows)
    learn(learner, samples_of(turns.rollouts(), rewards()))
    assert learner.baseline.calibrated.observed == P * G - len(EMPTY)
    fresh = type(learner.baseline.calibrated)()
    fresh.observe(wanted, score_SN.square().sum(1), G)
    close(learner.baseline.by_proxy(wanted), fresh.predict(wanted), 1e-6)
    for name in (*PROXIES, "calibrated"):
        weight_S = learner.baseline.by_proxy(found, name)
        assert (weight_S == 0).nonzero().flatten().tolist() == EMPTY


def run(turns, rewards_PG, **settings):
    """Two whole steps of the default algorithm on the rows, as a sampler of turns would return them."""
    learner, problems = (
        learner_of(turns.policy, "oblrpo_thrifty", **settings),
        [Problem(each, each) for each in PROMPTS],
    )
    temperature = learner.rollout.temperature
    steps = [learner.learn_from(samples_of(turns.rollouts(temperature), rewards_PG), number) for number in (1, 2)]
    return problems, steps


@must_notice
def test_metrics_of_whole_steps(turns):
    policy, rows, rewards_PG = turns.policy, turns.rows, rewards()
    entropies = truth_of(policy, rows, 0.9).entropies
    problems, (first, _) = run(turns, rewards_PG, temperature=0.9)
    metrics, own = step_metrics(1, first, 7), sum(len(row.own) for row in rows)
    assert metrics["completions/mean_length"] == pytest.approx(own / len(rows))
    assert metrics["entropy"] == pytest.approx(float(torch.cat(entropies).mean()))
    assert metrics["num_tokens"] == 7
    # As TRL counts: prompts, and what the policy has said.
    assert first.samples.rollouts.sequences.tokens == own + sum(len(row.prompt) for row in rows)
    assert [row["length"] for row in completion_rows(problems, first)] == [len(row.own) for row in rows]
    ids = [[row.completion[place] for place in row.own] for row in rows]
    assert first.samples.rollouts.ids() == ids
    said, counts = [tuple(each) for each in ids], torch.bincount(torch.tensor([*itertools.chain(*ids)]))
    found = text_metrics(problems, first, policy.end_tokens)
    assert found["completions/distinct_ratio"] == len({*said}) / len(said)
    assert found["completions/commonest_token_ratio"] == int(counts.max()) / int(counts.sum())


def test_a_policy_that_says_one_thing_is_seen_whatever_tools_answer(turns):
    """As text with the words of tools no completion is another."""
    end, rows, encode = turns.policy.end_tokens[0], [], turns.policy.tokenizer.encode
    for number, row in enumerate(turns.rows):
        first, second, *tool = encode(f"xy{number:02}")
        words = replace(row, completion=[first, end, *tool, second, end], words="oottoo")
        rows.append(words if number % 2 else replace(row, completion=[first, second, *tool], words="oott"))
    same = replace(turns, rows=rows)
    problems, (first, _) = run(same, rewards())
    assert len({*first.samples.rollouts.completions}) == P * G
    found = text_metrics(problems, first, turns.policy.end_tokens)
    assert found["completions/distinct_ratio"] == 1 / (P * G)
    assert found["completions/commonest_ratio"] == found["completions/same_ratio"] == 1
    assert found["completions/commonest_token_ratio"] == 0.5


@pytest.mark.parametrize("correction", ["auto", "truncated"])
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}, {"beta": 0.1}])
def test_where_only_rows_without_an_own_token_pull_nothing_changes(turns, correction, settings):
    """And a batch of nothing but words of tools breaks nothing."""
    rewards_PG = torch.zeros(P, G, dtype=torch.float64)
    rewards_PG.view(-1)[EMPTY] = 1.0  # under rloo their siblings would pull, too: the baseline is their own reward
    for rows in ([replace(row, words="t" * len(row.words)) for row in turns.rows], turns.rows):
        case, before = replace(turns, rows=rows), [p.detach().clone() for p in turns.policy.parameters]
        reported = replace(case.rollouts(), sampler_logps_SC=in_columns(rows, truth_of(case.policy, rows).logps))
        learner = learner_of(case.policy, "oblrpo", sampler_correction=correction, **settings)
        learner.baseline.begin = lambda learner=learner: NoBaseline(learner.baseline)
        result = learn(learner, samples_of(reported, rewards_PG))
        assert [update.learning_rate for update in result.updates] == [0.0] * len(result.updates)
        assert all(torch.equal(a, b) for a, b in zip(before, turns.policy.parameters, strict=True))


class NoBaseline:
    """A pass whose baseline is 0, so that rows with the reward 0 do not pull."""

    def __init__(self, past):
        self.prior = past.prior

    def of(self, rewards_PG, *_, **__):
        return torch.zeros_like(rewards_PG)

    def learn(self, *_):
        return {}


def test_the_memory_that_is_predicted_suffices(turns):
    """Predictions are of completions that are all the policy's own: words of tools take as much, and no more."""
    peaks = []
    for case in (turns, replace(turns, counted=True)):
        sequences = case.rollouts().sequences

        def step(sequences=sequences):
            turns.policy.logps(sequences).logps_S.sum().backward()

        peaks.append(peak_bytes(step, turns.policy.device))
        turns.policy.model.zero_grad()
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_rollouts_keep_whose_words_they_are(turns):
    """Some rows, in another order, and blocks of different widths joined."""
    rows = turns.rows
    rollouts = replace(turns.rollouts(), sampler_logps_SC=in_columns(rows, truth_of(turns.policy, rows).logps))
    blocks = [[2, 1], [9, 10, 11], [0]]
    joined = join([rollouts.at(torch.tensor(block)) for block in blocks])
    order = [row for block in blocks for row in block]
    assert joined.ids() == [[rows[row].completion[place] for place in rows[row].own] for row in order]
    truth = truth_of(turns.policy, [rows[row] for row in order])
    close(turns.policy.logps(joined.sequences).logps_S.detach(), truth.logps_S.detach())
    close(joined.sampler_logps_SC.sum(1), truth.logps_S.detach())
