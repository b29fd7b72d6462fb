import math
from dataclasses import replace

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import BASELINES, NORMALISATIONS, Prior
from oblrpo.estimators.baselines import SAMPLING, TRAINING
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rollout import sample
from oblrpo.scores import oracle
from oblrpo.step import Batch
from oblrpo.step.flow import ImportanceWeights
from oblrpo.step.look import LEDGER, WORK_SHARE, Looks, ledger_metrics
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
    looks = Looks(policy, 1.0, blocks, exact=exact)
    return looks.ledger(looks.at(batch, torch.arange(P), seed), batch, prior or Prior(), ON_POLICY)


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


@pytest.mark.parametrize("per_block", [0, 2])
def test_the_projected_ledger_is_close(tiny_policy, batch, per_block):
    prior, blocks = Prior(2.0), MicroBatches(per_block)
    exact = ledger_of(tiny_policy, batch, prior)
    runs = [ledger_of(tiny_policy, batch, prior, seed, blocks, exact=False) for seed in range(20)]
    for name, entry in exact.entries.items():
        found = torch.tensor([run.entries[name].variance for run in runs])
        assert abs(float(found.mean()) - entry.variance) <= 4 * float(found.std()) / 20**0.5 + 1e-6 * entry.variance
        assert float(found.std()) < 0.3 * entry.variance


def test_a_loss_weighting_has_no_part_of_prompts(tiny_policy, batch):
    """Its mean gradient is not that of the rewards, so that one batch cannot tell what comes from prompts."""
    algorithm = Algorithm("rloo", weighting="sequence_mean")
    ledger = ledger_of(tiny_policy, Batch.of(batch.sequences, batch.rewards_PG, algorithm=algorithm))
    assert math.isnan(ledger.between)


def test_the_ledger_leaves_no_gradient_and_names_every_baseline(tiny_policy, batch):
    metrics = ledger_metrics(ledger_of(tiny_policy, batch, exact=False))
    assert all(p.grad is None for p in tiny_policy.parameters)
    assert {f"variance/{name}" for name in BASELINES} <= set(metrics)
    assert {f"signal2/{name}" for name in BASELINES} <= set(metrics)
    assert metrics["variance/mean"] == pytest.approx(((G - 1) / G) ** 2 * metrics["variance/rloo"], rel=1e-5)


def test_a_ledger_is_taken_when_its_share_of_the_work_has_been_saved(tiny_policy, batch, monkeypatch):
    """Work is counted in tokens, less where less is trained on; a run that goes on takes it in the same step."""
    all_S = torch.ones(P * G, dtype=torch.bool)
    half_S = torch.tensor([True, False, False, True]).repeat(P)
    tokens_S = batch.sequences.mask_ST.sum(1)
    for trained_S in (all_S, half_S):
        taken = []
        both = [Looks(tiny_policy, 1.0, ALL, every=10**9, ledger_steps=None) for _ in range(2)]
        for step in range(1, 400):
            if step == 50:
                both[1] = Looks(tiny_policy, 1.0, ALL, every=10**9, ledger_steps=None)
                both[1].load_state_dict(both[0].state_dict())
            for looks in both:
                monkeypatch.setattr(
                    looks, "at", lambda *given, taken=taken: taken.extend(given[2:]) if given[2] else None
                )
                looks.take(batch, step)
                looks.save_up(int(tokens_S.sum()), int(tokens_S[trained_S].sum()), True)
        assert taken[::2] == taken[1::2]
        trained = float(tokens_S[trained_S].sum() / tokens_S.sum())
        a_step = WORK_SHARE * (SAMPLING + TRAINING * trained) / LEDGER
        assert len(taken[::2]) == int(398 * a_step) > 1
        for looks, step in enumerate(taken[::2], start=1):
            assert looks - 1e-9 <= (step - 1) * a_step <= looks + a_step + 1e-9


def test_two_prompts_are_enough_and_one_is_not(tiny_policy, batch):
    looks = Looks(tiny_policy, 1.0, ALL, ledger_steps=1)
    for prompts, taken in ((2, True), (1, False), (0, False)):
        valid_PG = torch.zeros(P, G, dtype=torch.bool)
        valid_PG[:prompts] = True
        some = replace(batch, valid_PG=valid_PG)
        looked = looks.take(some, 1)
        assert (looked is not None) == (prompts > 0)
        assert bool(looks.metrics(looked, some, Prior(), ON_POLICY)) is taken


@pytest.mark.parametrize(("every", "steps"), [(0, []), (3, [1, 3, 6])])
def test_a_ledger_is_taken_in_step_1_and_in_every_so_many(tiny_policy, batch, every, steps):
    """Step 0 is no step of a run."""
    looks = Looks(tiny_policy, 1.0, ALL, every=2, ledger_steps=every, exact=True)
    metrics = {step: looks.metrics(looks.take(batch, step), batch, Prior(), ON_POLICY) for step in range(7)}
    assert [step for step, found in metrics.items() if found] == steps


def test_inner_products_are_estimated_across_prompts_and_exact_within(tiny_policy, batch):
    """However the prompts are distributed over micro-batches; outputs that do not count take no part in a ledger."""
    valid_PG = torch.ones(P, G, dtype=torch.bool)
    valid_PG[1, 2:], valid_PG[3, 1:] = False, False
    some = replace(batch, valid_PG=valid_PG)
    exact = Looks(tiny_policy, 1.0, ALL, exact=True)
    chosen_P, prior = torch.tensor([1, 2, 3, 4]), Prior(2.0)
    expected = exact.ledger(exact.at(some, chosen_P, 0), some, prior, ON_POLICY)
    assert "otb" in expected.entries
    looks, found = Looks(tiny_policy, 1.0, MicroBatches(2)), []
    for seed in range(20):
        looked = looks.at(some, chosen_P, seed)
        gram_KPGPG = looked.look.estimates_SS.view(2, 4, G, 4, G)
        within = gram_KPGPG.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        assert torch.equal(within, looked.look.gram_PGG.expand(2, -1, -1, -1))
        found.append(looks.ledger(looked, some, prior, ON_POLICY))
    for name, entry in expected.entries.items():
        values = torch.tensor([each.entries[name].variance for each in found])
        assert abs(float(values.mean()) - entry.variance) <= 4 * float(values.std()) / 20**0.5 + 1e-6 * entry.variance
