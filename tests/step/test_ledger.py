import math
from dataclasses import replace

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, NORMALISATIONS, Prior
from oblrpo.policy.micro_batches import MicroBatches
from oblrpo.rollout import sample
from oblrpo.scores import oracle
from oblrpo.step import Batch
from oblrpo.step.ledger import LEDGER, SAMPLING, TRAINING, WORK_SHARE, VarianceLedger, ledger_metrics
from oblrpo.step.off_policy import ImportanceWeights
from oblrpo.tables.algorithms import RATIOS, Algorithm

P, G, LONGEST = 5, 4, 6

ALL = MicroBatches()
ON_POLICY = ImportanceWeights(RATIOS["sequence"])


@pytest.fixture
def batch(tiny_policy):
    torch.manual_seed(1)
    rollouts = sample(tiny_policy, ["a", "bcd", "ef", "ghij", "k"], G, LONGEST, 1.0)
    return Batch.of(rollouts.sequences, torch.randint(2, (P, G)).float())


def ledger_of(policy, batch, prior=None, seed=0, blocks=ALL, *, exact=True):
    return VarianceLedger(policy, 1.0, blocks, exact=exact).take(batch, prior or Prior(), seed, ON_POLICY).ledger


def scores(policy, scored_S):
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in oracle.scores(policy.model, scored_S)])


@pytest.mark.parametrize("name", BASELINES)
def test_the_exact_ledger_is_the_sample_covariance_of_prompt_gradients(tiny_policy, batch, name):
    sequences, rewards_PG, entry = batch.sequences, batch.rewards_PG, BASELINES[name]
    ledger = ledger_of(tiny_policy, batch)
    out = tiny_policy.logps(sequences)
    mask_SC = sequences.own_SC
    inputs = {"norm2_PG": scores(tiny_policy, out.logps_S).square().sum(1).view(P, G),
              "length_PG": sequences.lengths_S.view(P, G), "logit_norm2_PGT": out.logit_norm2_SC.view(P, G, -1),
              "token_mask_PGT": mask_SC.view(P, G, -1)}  # fmt: skip
    baseline = estimators.baseline(name, rewards_PG, **inputs)
    out = tiny_policy.logps(sequences)
    if entry.by_token:
        vectors = scores(
            tiny_policy, (out.token_logps_SC * (rewards_PG[..., None] - baseline).flatten(0, 1) * mask_SC).sum(1)
        )
    else:
        vectors = scores(tiny_policy, out.logps_S) * (rewards_PG - baseline).flatten()[:, None]
    vectors = vectors / NORMALISATIONS[entry.normalisation](rewards_PG).flatten()[:, None]
    prompts = vectors.view(P, G, -1).mean(1)
    found = ledger.entries[name]
    assert found.variance == pytest.approx(float(prompts.var(0).sum()) / P, rel=1e-3)
    total = prompts.mean(0).square().sum()
    assert found.signal2 == pytest.approx(float(total) - found.variance, rel=1e-3, abs=1e-4 * found.variance)
    assert math.isnan(found.within) != entry.unbiased


@pytest.mark.parametrize("per_block", [0, 2])
def test_the_projected_ledger_is_close(tiny_policy, batch, per_block):
    prior, blocks = Prior(2.0), MicroBatches(per_block)
    exact = ledger_of(tiny_policy, batch, prior)
    runs = [ledger_of(tiny_policy, batch, prior, seed, blocks, exact=False) for seed in range(20)]
    for name, entry in exact.entries.items():
        found = torch.tensor([run.entries[name].variance for run in runs])
        assert abs(float(found.mean()) - entry.variance) <= 4 * float(found.std()) / 20**0.5 + 1e-6 * entry.variance
        assert float(found.std()) < 0.3 * entry.variance


def test_a_loss_weighting_has_no_within_part(tiny_policy, batch):
    """Its mean gradient is not that of the rewards, so that one batch cannot tell what comes from prompts."""
    algorithm = Algorithm("rloo", weighting="sequence_mean")
    ledger = ledger_of(tiny_policy, Batch.of(batch.sequences, batch.rewards_PG, algorithm=algorithm))
    assert all(math.isnan(entry.within) for entry in ledger.entries.values())
    assert math.isnan(ledger.between)


def test_an_exact_ledger_needs_one_block(tiny_policy):
    with pytest.raises(ValueError, match="one micro-batch"):
        VarianceLedger(tiny_policy, 1.0, MicroBatches(2), exact=True)


def test_the_ledger_leaves_no_gradient_and_names_every_baseline(tiny_policy, batch):
    metrics = ledger_metrics(ledger_of(tiny_policy, batch, exact=False))
    assert all(p.grad is None for p in tiny_policy.parameters)
    assert {f"variance/{name}" for name in BASELINES} <= set(metrics)
    assert {f"signal2/{name}" for name in BASELINES} <= set(metrics)
    assert metrics["variance/mean"] == pytest.approx(((G - 1) / G) ** 2 * metrics["variance/rloo"], rel=1e-5)


def test_a_ledger_is_taken_when_its_share_of_the_work_has_been_saved(tiny_policy, batch, monkeypatch):
    """Work is counted in tokens, less where less is trained on; a run that goes on takes it in the same step."""
    skipped_PG = torch.tensor([False, True, True, False]).expand(P, G)
    tokens_S = batch.sequences.mask_ST.sum(1)
    for each in (batch, replace(batch, skipped_PG=skipped_PG)):
        taken = []
        ledgers = [VarianceLedger(tiny_policy, 1.0, ALL, every=None) for _ in range(2)]
        for step in range(1, 400):
            if step == 50:
                ledgers[1] = VarianceLedger(tiny_policy, 1.0, ALL, every=None)
                ledgers[1].load_state_dict(ledgers[0].state_dict())
            for ledger in ledgers:
                monkeypatch.setattr(ledger, "take", lambda *_, step=step, taken=taken: taken.append(step))
                ledger.metrics(each, Prior(), step, ON_POLICY)
                ledger.save_up(each)
        assert taken[::2] == taken[1::2]
        trained = float(tokens_S[each.kept_PG.flatten()].sum() / tokens_S.sum())
        a_step = WORK_SHARE * (SAMPLING + TRAINING * trained) / LEDGER
        assert len(taken[::2]) == int(398 * a_step) > 1
        for looks, step in enumerate(taken[::2], start=1):
            assert looks - 1e-9 <= (step - 1) * a_step <= looks + a_step + 1e-9


def test_two_prompts_are_enough_and_one_is_not(tiny_policy, batch):
    for prompts, taken in ((2, True), (1, False)):
        valid_PG = torch.zeros(P, G, dtype=torch.bool)
        valid_PG[:prompts] = True
        some = replace(batch, valid_PG=valid_PG)
        assert (VarianceLedger(tiny_policy, 1.0, ALL).take(some, Prior(), 0, ON_POLICY) is not None) is taken


@pytest.mark.parametrize(("every", "steps"), [(0, []), (3, [1, 3, 6])])
def test_a_ledger_is_taken_in_step_1_and_in_every_so_many(tiny_policy, batch, every, steps):
    """With the effective dimension of RLOO's noise beside it; step 0 is no step of a run."""
    ledger = VarianceLedger(tiny_policy, 1.0, ALL, exact=True, every=every)
    metrics = {step: ledger.metrics(batch, Prior(), step, ON_POLICY) for step in range(7)}
    assert [step for step, found in metrics.items() if found] == steps
    for found in filter(None, metrics.values()):
        rloo = ledger_of(tiny_policy, batch).entries["rloo"]
        assert found["effective_dimension"] == pytest.approx(rloo.effective_dimension, rel=1e-6)
