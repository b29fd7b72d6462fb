"""A look against loop autograd, and when a run looks at which prompts."""

from dataclasses import replace

import pytest
import torch

from oblrpo.errors import DivergedError
from oblrpo.estimators.baselines import SAMPLING, TRAINING
from oblrpo.policy import Logps
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rollout import sample
from oblrpo.scores import oracle
from oblrpo.step import Batch
from oblrpo.step.look import FIRST, FIRST_PROMPTS, LEDGER, LOOK, WORK_SHARE, Looks, look, look_by

P, G, LONGEST = 5, 4, 6
PROMPTS = ["a", "bcd", "ef", "ghij", "k"]


@pytest.fixture
def policy(tiny_policy):
    """In float64, for the comparison with loop autograd."""
    tiny_policy.model.double()
    return tiny_policy


@pytest.fixture
def sequences(policy):
    torch.manual_seed(1)
    return sample(policy, PROMPTS, G, LONGEST, 1.0).sequences


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("micro_batches", [MicroBatches(), MicroBatches(2), MicroBatches(tokens=40)])
def test_a_look_is_what_loop_autograd_finds(policy, sequences, micro_batches, by_token):
    """In the order of the rows, whichever of them go through the model together."""
    weight_SC = torch.randn(P * G, LONGEST, dtype=torch.float64) if by_token else None
    seen = look(policy, sequences, G, 0.8, micro_batches, token_weight_SC=weight_SC)
    assert all(parameter.grad is None for parameter in policy.parameters)
    out = policy.logps(sequences, 0.8)
    own_SC = sequences.own_SC
    weight_SC = torch.ones_like(out.token_logps_SC) if weight_SC is None else weight_SC[:, : own_SC.shape[1]]
    scored_S = (out.token_logps_SC * weight_SC * own_SC).sum(1)
    score_SN = torch.stack([torch.cat([g.flatten() for g in row]) for row in oracle.scores(policy.model, scored_S)])
    score_PGN = score_SN.unflatten(0, (P, G))
    gram_PGG = score_PGN @ score_PGN.mT
    assert (seen.gram_PGG - gram_PGG).norm() <= 1e-10 * gram_PGG.norm()
    torch.testing.assert_close(seen.norm2_PG, score_PGN.square().sum(2), rtol=1e-10, atol=0)
    out = policy.logps(sequences, 0.8).detached()
    torch.testing.assert_close(seen.logps.logps_S, out.logps_S, rtol=1e-10, atol=0)
    for name in ("token_logps_SC", "entropy_SC", "logit_norm2_SC"):
        values_SC = torch.where(own_SC.bool(), getattr(out, name), 0.0)
        torch.testing.assert_close(getattr(seen.logps, name), values_SC, rtol=1e-9, atol=1e-12)


def test_pairs_across_prompts(policy, sequences):
    """Exact on request; and from two sketches, which micro-batches do not change."""
    exact = look(policy, sequences, G, 1.0, MicroBatches(2), all_pairs=True)
    pairs_SS = exact.pairs_SS
    blocks = [pairs_SS[p * G : p * G + G, p * G : p * G + G] for p in range(P)]
    torch.testing.assert_close(exact.gram_PGG, torch.stack(blocks), rtol=0, atol=0)
    one, two = (look(policy, sequences, G, 1.0, each, sketch_seed=3) for each in (MicroBatches(), MicroBatches(2)))
    assert len(one.sketches) == 2
    for first, second in zip(one.sketches, two.sketches, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)
    for estimate_SS in one.estimates_SS:
        assert (estimate_SS - pairs_SS).norm() < 0.5 * pairs_SS.norm()
        assert (estimate_SS - pairs_SS).norm() > 0


@pytest.mark.parametrize("group_size", [1, 2])
def test_any_forward_will_do_and_idle_passes_count_for_nothing(group_size):
    """Blocks in any order, of any width; ranks that share a model make as many passes each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    input_SK, passes = torch.randn(10, 3, dtype=torch.float64), []

    def forward(rows_S):
        passes.append(rows_S.tolist())
        logp_S, width = model(input_SK[rows_S])[:, 0], len(rows_S)
        token_SC = logp_S[:, None].expand(-1, width)
        own_SC = (torch.arange(width) < 2).long().expand(width, -1)
        return logp_S, Logps(logp_S, token_SC, token_SC.detach(), token_SC.detach(), own_SC), None

    blocks = [torch.tensor([4, 5, 2, 3]), torch.tensor([6, 7, 8, 9]), torch.tensor([0, 1])]
    seen = look_by(model, forward, blocks, group_size, idle=2)
    assert passes == [block.tolist() for block in (*blocks, blocks[-1], blocks[-1])]
    logp_S = model(input_SK)[:, 0]
    score_SN = torch.stack([torch.cat([g.flatten() for g in row]) for row in oracle.scores(model, logp_S)])
    score_PGN = score_SN.unflatten(0, (-1, group_size))
    torch.testing.assert_close(seen.gram_PGG, score_PGN @ score_PGN.mT, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(seen.logps.logps_S, logp_S.detach(), rtol=1e-12, atol=0)
    two_SC = torch.nn.functional.pad(logp_S.detach()[:, None].expand(-1, 2), (0, 2))
    torch.testing.assert_close(seen.logps.token_logps_SC, two_SC, rtol=1e-12, atol=0)


def test_a_broken_policy_is_named(policy, sequences):
    with torch.no_grad():
        policy.parameters[-1].fill_(torch.nan)
    with pytest.raises(DivergedError, match="log-probability"):
        look(policy, sequences, G, 1.0, MicroBatches())


def a_batch(sequences, prompts=P):
    return Batch.of(sequences.at(slice(prompts * G)), torch.randint(2, (prompts, G)).float())


def taken_of(looks, batch, steps):
    """The prompts that are looked at in every step, all of whose outputs are trained on."""
    found = {}
    for step in steps:
        looked = looks.take(batch, step)
        found[step] = [] if looked is None else looked.prompts_P.tolist()
        tokens_S = batch.sequences.mask_ST.sum(1)
        trained = int(tokens_S[batch.valid_PG.flatten()].sum())
        looks.save_up(int(tokens_S.sum()), trained, looked is not None)
    return found


def test_looks_come_in_the_first_steps_and_then_in_every_so_many(policy, sequences, monkeypatch):
    monkeypatch.setattr("oblrpo.step.look.look", lambda *given, **more: given)
    batch = a_batch(sequences)
    for every, due in ((1, [*range(1, 25)]), (10, [*range(1, FIRST + 1), 10, 20])):
        found = taken_of(Looks(policy, 1.0, MicroBatches(), every), batch, range(25))
        assert [step for step, prompts in found.items() if prompts] == due
        if every == 1:
            assert all(found[step] == list(range(P)) for step in due)


def test_so_many_prompts_as_past_work_pays_for(policy, sequences, monkeypatch):
    """Drawn by the step among those that take part, every prompt as often as another, and no more work than said."""
    monkeypatch.setattr("oblrpo.step.look.look", lambda *given, **more: given)
    many = Batch.of(type(sequences).join([sequences] * 8), torch.randint(2, (8 * P, G)).float())
    valid_PG = many.valid_PG.clone()
    valid_PG[:4] = False
    some, looks = replace(many, valid_PG=valid_PG), Looks(policy, 1.0, MicroBatches(), every=10)
    found = taken_of(looks, some, range(1, 10001))
    assert found == taken_of(
        Looks(policy, 1.0, MicroBatches(), every=10), replace(some, rewards_PG=-some.rewards_PG), found
    )
    assert all(len(found[step]) == FIRST_PROMPTS for step in range(1, FIRST + 1))
    later = [prompts for step, prompts in found.items() if step > FIRST and step % 10 == 0]
    assert not any(prompts for step, prompts in found.items() if step > FIRST and step % 10)
    tokens_P = many.sequences.mask_ST.sum(1).view(8 * P, G).sum(1).float()
    work = 10000 * (SAMPLING * tokens_P.sum() + TRAINING * tokens_P[4:].sum())
    looked = sum(LOOK * len(prompts) * tokens_P.mean() for prompts in later)
    assert float(looked / work) == pytest.approx(WORK_SHARE, rel=0.01)
    seen = torch.zeros(8 * P).index_add(
        0, torch.tensor([prompt for prompts in later for prompt in prompts]), torch.ones(sum(map(len, later)))
    )
    chance = float(seen.sum()) / len(later) / (8 * P - 4)
    assert seen[:4].sum() == 0
    assert ((seen[4:] / len(later) - chance).abs() < 4.5 * (chance * (1 - chance) / len(later)) ** 0.5).all()


def test_where_past_work_pays_for_no_prompt_the_look_waits(policy, sequences, monkeypatch):
    monkeypatch.setattr("oblrpo.step.look.look", lambda *given, **more: given)
    batch = a_batch(sequences, 2)
    found = taken_of(Looks(policy, 1.0, MicroBatches(), every=10), batch, range(1, 201))
    later = [step for step, prompts in found.items() if prompts and step > FIRST]
    a_look = LOOK / 2 / (WORK_SHARE * (SAMPLING + TRAINING))  # steps that pay for one of the two prompts
    assert later[0] >= a_look
    assert len(later) == pytest.approx(200 / a_look, abs=2)


def test_what_is_looked_at_does_not_depend_on_the_batch_s_own_lengths(policy, sequences, monkeypatch):
    """An output that is longer must not choose whether exact norms weigh its siblings: the past alone decides."""
    monkeypatch.setattr("oblrpo.step.look.look", lambda *given, **more: given)
    batch, found = a_batch(sequences), []
    shorter = replace(sequences, mask_ST=sequences.mask_ST.clone(), own_ST=sequences.own_ST.clone())
    shorter.mask_ST[:, -1] = shorter.own_ST[:, -1] = 0
    assert shorter.tokens < sequences.tokens
    for each in (sequences, shorter):
        looks = Looks(policy, 1.0, MicroBatches(), every=10, ledger_steps=None)
        looks.load_state_dict(
            {"taken": FIRST, "tokens": float(sequences.tokens), "for_looks": 2.0 * LOOK * sequences.tokens / P,
             "for_ledger": LEDGER * sequences.tokens - 1e-3, "own": 0.0, "own_looks": 0.0}
        )  # fmt: skip
        looked = looks.take(replace(batch, sequences=each.at(slice(P * G))), 10)
        found.append((looked.prompts_P.tolist(), looked.seed))
    assert found[0] == found[1]
    assert len(found[0][0]) == 2


def test_what_is_taken(policy, sequences):
    batch = a_batch(sequences)
    looks = Looks(policy, 1.0, MicroBatches(), every=10, ledger_steps=7)
    with_ledger, without = looks.take(batch, 1), looks.take(batch, 2)
    looks._past.taken = FIRST
    assert looks.take(batch, 6) is None
    assert (with_ledger.seed, without.seed, len(without.look.sketches)) == (1, None, 0)
    assert torch.equal(with_ledger.prompts_P, torch.arange(P))
    assert len(without.prompts_P) == min(FIRST_PROMPTS, P)
    torch.testing.assert_close(
        without.look.gram_PGG, with_ledger.look.gram_PGG[without.prompts_P], rtol=1e-10, atol=1e-12
    )
    nothing = replace(batch, valid_PG=torch.zeros_like(batch.valid_PG))
    assert looks.take(nothing, 1) is looks.take(nothing, 2) is None
