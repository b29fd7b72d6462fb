"""Statistics of the lab book: by hand, or against autograd."""

import json
import re
from dataclasses import replace

import pytest
import torch

from lab.benchmarks import ledger, prior_coupling, schedule, variance
from lab.benchmarks.real_scores import Drawn, Source, exponent, proxies
from oblrpo.estimators import Prior, baseline
from oblrpo.rollout import sample
from oblrpo.scores import Features
from oblrpo.settings import TrainConfig, load_recipe
from tests.lab.conftest import ByFirst
from tests.lab.test_noise_split import pool_of


@pytest.mark.parametrize("G", [2, 4])
def test_the_variance_within_prompts_is_that_of_the_groups_gradients(G):
    """RLOO's advantages by hand, on scores that are known as vectors."""
    generator = torch.Generator().manual_seed(0)
    score_QMD = torch.randn(3, 8, 5, generator=generator, dtype=torch.float64)
    rewards_QM = torch.rand(3, 8, generator=generator, dtype=torch.float64)
    rewards_QRG = rewards_QM.view(3, 8 // G, G)
    advantages = (rewards_QRG - rewards_QRG.mean(2, keepdim=True)) * G / (G - 1)
    gradient_QRD = (advantages[..., None] * score_QMD.view(3, 8 // G, G, 5)).mean(2)
    inner, sketch = variance.gradients(pool_of(rewards_QM, score_QMD), "rloo", G, None, 0)
    torch.testing.assert_close(sketch.double(), gradient_QRD)
    torch.testing.assert_close(variance.within(inner), gradient_QRD.var(1).sum(1))


@pytest.mark.parametrize("name", ["rloo", "grpo", "otb"])
def test_the_gradients_that_the_ledger_is_checked_with_are_autograds(tiny_policy, name):
    torch.manual_seed(1)
    sequences = sample(tiny_policy, ["a", "b"], 3, 6, 1.0).sequences
    rewards_PG = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]])
    found = ledger.gradients(tiny_policy, sequences, rewards_PG, [name])[name]
    out = tiny_policy.logps(sequences)
    if name == "rloo":
        weight_PGT = (1.5 * (rewards_PG - rewards_PG.mean(1, keepdim=True)))[..., None]
    elif name == "grpo":
        centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
        weight_PGT = (centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-4))[..., None]
    else:
        norms = {
            "logit_norm2_PGT": out.logit_norm2_SC.view(2, 3, -1),
            "token_mask_PGT": sequences.own_SC.view(2, 3, -1),
        }
        weight_PGT = rewards_PG[..., None] - baseline("otb", rewards_PG, **norms)
    loss = (weight_PGT.detach().flatten(0, 1) * out.token_logps_SC * sequences.own_SC).sum() / 6
    expected = torch.cat([each.flatten() for each in torch.autograd.grad(loss, tiny_policy.parameters)]).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_factors_of_a_batch_by_hand(monkeypatch):
    """Gradients 3 and 1: ||g||^2 = 4, T = 2 and S = 4 - 1, so that S / (S + T / N) is 3 / 4, and 4 / 5 plugged in."""
    monkeypatch.setattr(schedule, "DEALS", 1)
    generator, rows = torch.Generator(), torch.tensor([[3.0], [1.0]])
    assert schedule.factors(rows, 2, "debiased", 0.0, generator) == pytest.approx([0.75])
    assert schedule.factors(rows, 2, "plugin", 0.0, generator) == pytest.approx([0.8])


def test_how_far_a_prior_of_the_batch_puts_the_signal_off():
    """Two runs of two prompts: the first one's differences are 1 and 1, whose product is the excess, the other's 0."""
    tally = prior_coupling.Tally(true2=1.0)
    tally.add(
        group_RPD=torch.tensor([[[3.0], [1.0]], [[1.0], [1.0]]]),
        before_RPD=torch.tensor([[[2.0], [0.0]], [[1.0], [1.0]]]),
        other_RPD=torch.tensor([[[3.0], [3.0]], [[1.0], [1.0]]]),
    )
    # 1.96 * 0.7071 / sqrt(2); the noise is (4 + 1) / 2 - 1, under the other prior (9 + 1) / 2 - 1
    assert tally.row() == "1.500 +- 0.980 | 0.667 | +0.3333 | 2.667"


@pytest.mark.parametrize("past_only", [False, True])
def test_the_priors_of_many_runs_are_those_of_each(past_only):
    many, one = prior_coupling.Priors(2, past_only), Prior(past_only=past_only)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        rewards_RPG = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
        norm2_RPG = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
        expected_PG = baseline("oblr_shrunk", rewards_RPG[1], norm2_PG=norm2_RPG[1], prior=one)
        torch.testing.assert_close(many.baselines(rewards_RPG, norm2_RPG, past_only)[1], expected_PG)
        many.next_step(rewards_RPG, norm2_RPG)
        one.observe(rewards_RPG[1], norm2_RPG[1])
        one.next_step()


def test_the_noise_scale_in_other_ways(printed_by):
    """The command itself stops where gns-pytorch and we differ on whether there is a figure at all."""
    pytest.importorskip("gns_pytorch", reason="gns-pytorch is of the extra `dev`")
    sizes = ["--batches", 3, "--prompts", 16, "--outputs", 2, "--window", 1]
    printed = printed_by("noise_scale", sizes)
    apart = re.search(r"at most (\S+) apart", printed)
    assert float(apart[1]) < 1e-3


def test_scores_come_back_in_the_order_of_their_outputs(saved_model, monkeypatch):
    monkeypatch.setattr("lab.benchmarks.real_scores.Rewards", ByFirst)
    config = load_recipe("demo", TrainConfig())
    rollouts = [replace(config.rollout, tokens_per_micro_batch=tokens) for tokens in (0, 500)]
    whole, parts = (Source(str(saved_model), replace(config, rollout=each)).draw(1) for each in rollouts)
    torch.testing.assert_close(parts.norm2_S, whole.norm2_S)
    for name, values_S in vars(whole.features).items():
        torch.testing.assert_close(getattr(parts.features, name), values_S)


def test_the_exponent_of_norms_that_grow_with_the_square_of_length():
    length_S = torch.tensor([1.0, 2, 4, 8, 3, 3])
    ones_S = torch.ones(6)
    norm2_S = length_S**2 * torch.tensor([5.0, 5, 7, 7, 1, 1])  # a scale of each group's own
    drawn = Drawn(None, Features(length_S, ones_S, ones_S, ones_S), norm2_S)
    assert exponent([drawn], 2).startswith("a = 2.00 +- 0.00 over 2 prompts")


def test_score_norms_of_outputs_of_one_length(capsys):
    """No exponent, and nothing that a proxy by length could agree with."""
    ones_S, norm2_S = torch.ones(6), torch.tensor([1.0, 2, 3, 4, 5, 6])
    drawn = Drawn(None, Features(4 * ones_S, ones_S, ones_S, norm2_S**2), norm2_S)
    assert exponent([drawn], 2).startswith("Outputs of a prompt hardly differ")
    proxies([drawn, drawn], 2, drawn)
    printed = capsys.readouterr().out
    assert "| length |  | 0.22 +- 0.00 |" in printed  # ln(2), ln(4/3) and ln(6/5), halved, root mean square
    assert "| logit | 1.00 +- 0.00 | 0.22 +- 0.00 |" in printed


def test_the_agreement_of_proxies_over_finished_runs(tmp_path, printed_by):
    """Steps 1 to 30; the first is left out of all averages, and so is a step without a value."""
    for seed, value in enumerate((0.2, 0.4)):
        run = tmp_path / f"seed_{seed}"
        run.mkdir()
        (run / "report.html").touch()
        keys = [f"score_norm2/agreement_{name}" for name in ("length", "logit", "calibrated")]
        lines = [{"step": n} | dict.fromkeys(keys, value if n < 21 else value + 0.3) for n in range(31)]
        lines[1] |= dict.fromkeys(keys, 9.0)
        lines[5][keys[0]] = None
        lines[6][keys[0]] = value + 0.18
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = printed_by("proxies", ["--folder", tmp_path, "--seeds", 2])
    assert "| 0 | 2 - 20 | 0.210 | 0.200 | 0.200 |" in printed  # 18 values of `length`, one of them 0.38
    assert "| 1 | all from 2 | 0.514 | 0.503 | 0.503 |" in printed
    assert "| 1 | last 20 | 0.550 | 0.550 | 0.550 |" in printed
