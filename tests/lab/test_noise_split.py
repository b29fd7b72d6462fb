"""The split of a gradient's noise: by every pool of a tiny population, without each prompt, and on a run's policy."""

import itertools
import math
import shutil

import pytest
import torch

from lab.benchmarks import noise_split, variance
from lab.benchmarks.pool import Pool
from oblrpo.estimators import baseline
from oblrpo.runs import RunFolder
from oblrpo.settings import TrainConfig, load_recipe
from tests.estimators.bandits import bandit
from tests.lab.conftest import ByFirst

PROMPT_PROBABILITY = (0.4, 0.6)
CASES = (("none", 1), ("none", 2), ("rloo", 2))


def pool_of(rewards, score_QMD):
    """A pool whose sketches are the scores themselves."""
    gram, ones = score_QMD @ score_QMD.mT, torch.ones_like(rewards)
    return Pool(None, [], rewards, score_QMD.square().sum(2), ones, ones[..., None], ones[..., None], gram, score_QMD)


@pytest.fixture
def groups_of_two(monkeypatch):
    """B comes from pairs of RLOO's groups of two."""
    monkeypatch.setattr(noise_split, "NAMES", ("none", "rloo"))
    monkeypatch.setattr(noise_split, "SIZES", (1, 2))
    monkeypatch.setattr(noise_split, "REFERENCE", ("rloo", 2))


def test_the_split_is_unbiased_by_exact_enumeration(groups_of_two):
    """Every draw of two prompts with four outputs each, against the variances written out."""
    policy = bandit(2, 2, seed=11)
    score_PAD = policy.score_PATD.sum(2)
    mu_PD = (policy.probability_PA[..., None] * policy.reward_PA[..., None] * score_PAD).sum(1)
    probability_P = torch.tensor(PROMPT_PROBABILITY, dtype=torch.float64)
    true_D = probability_P @ mu_PD

    def within(name, G):
        """The mean over prompts of E ||g||^2 - ||mu||^2, over every group."""
        total = -float(probability_P @ mu_PD.square().sum(1))
        for p, draw in itertools.product(range(2), itertools.product(range(2), repeat=G)):
            rewards_1G, score_GD = policy.reward_PA[p, list(draw)][None], score_PAD[p, list(draw)]
            gradient_D = ((rewards_1G - baseline(name, rewards_1G))[0, :, None] * score_GD).mean(0)
            total += PROMPT_PROBABILITY[p] * float(
                policy.probability_PA[p, list(draw)].prod() * gradient_D.square().sum()
            )
        return total

    found = torch.zeros(2 + len(CASES), dtype=torch.float64)
    for which in itertools.product(range(2), repeat=2):
        for draw in itertools.product(range(2), repeat=8):
            row_Q1, index_QM = torch.tensor(which)[:, None], torch.tensor(draw).view(2, 4)
            chance = math.prod(PROMPT_PROBABILITY[q] for q in which)
            chance *= float(policy.probability_PA[row_Q1, index_QM].prod())
            split = noise_split.split(pool_of(policy.reward_PA[row_Q1, index_QM], score_PAD[row_Q1, index_QM]), 0)
            figures = (split.signal_N, split.between_N, *(split.within_N[case] for case in CASES))
            found += chance * torch.stack([figure_N[0] for figure_N in figures])
    signal2 = float(true_D @ true_D)
    expected = [signal2, float(probability_P @ mu_PD.square().sum(1)) - signal2, *(within(*case) for case in CASES)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)  # sketches are of single precision
    assert expected[2] == pytest.approx(2 * expected[3])  # a baseline that sees no output has W_1 / G


def test_what_is_left_without_a_prompt_is_what_the_others_say(groups_of_two):
    torch.manual_seed(0)
    rewards, score_QMD = torch.rand(5, 6).double(), torch.randn(5, 6, 3).double()
    whole = noise_split.split(pool_of(rewards, score_QMD), 0)
    for q in range(5):
        others = [p for p in range(5) if p != q]
        rest = noise_split.split(pool_of(rewards[others], score_QMD[others]), 0)
        for ours_N, theirs_N in [
            (whole.signal_N, rest.signal_N), (whole.between_N, rest.between_N),
            *((whole.within_N[case], rest.within_N[case]) for case in CASES),
        ]:  # fmt: skip
            assert float(ours_N[1 + q]) == pytest.approx(float(theirs_N[0]), rel=1e-4)


def test_margins_hold_the_truth_in_nineteen_of_twenty_pools():
    """Gradients around (2, 0, 0), of variance 1 between prompts and 3 within them in every direction; G = 1."""
    torch.manual_seed(1)
    true, held = {"signal": 4.0, "between": 3.0, "within": 9.0, "share": 0.75}, []
    for _ in range(400):
        mean_QD = torch.tensor([2.0, 0, 0]) + torch.randn(60, 3)
        gradient_QRD = (mean_QD[:, None] + 3**0.5 * torch.randn(60, 8, 3)).double()
        inner_QRR = gradient_QRD @ gradient_QRD.mT
        signal_N = noise_split.signal(gradient_QRD.mean(1))
        within_N = {("none", 1): noise_split.left_out(variance.within(inner_QRR))}
        found = noise_split.Split(signal_N, noise_split.between(inner_QRR, signal_N), within_N)
        figures = (found.signal_N, found.between_N, within_N["none", 1], found.share_N("none", 1))
        shown = [map(float, noise_split.cell(figure_N, ".6f").split(" +- ")) for figure_N in figures]
        held.append([abs(value - t) < margin for (value, margin), t in zip(shown, true.values(), strict=True)])
    for share in torch.tensor(held).double().mean(0).tolist():
        assert 0.91 < share < 0.98


def test_the_tables_of_a_run(tmp_path, monkeypatch, printed_by, saved_model):
    monkeypatch.setattr("lab.benchmarks.pool.Rewards", ByFirst)
    run = RunFolder(tmp_path / "path-0")
    run.create(load_recipe("demo", TrainConfig()))
    for step in (0, 10):
        shutil.copytree(saved_model, run.checkpoint(step))
    printed = printed_by("noise_split", [run.path, "--prompts", 12, "--outputs", 8])
    last = printed.split("\n\n")[-1].splitlines()
    assert [row.split("|")[1:3] for row in last[2:]] == [
        [f" path-0, {step} ", f" {name} "] for step in (0, 10) for name in ("rloo", "oblr_shrunk")
    ]
    assert last[3].split("|")[5] == " 1.00 +- 0.00 "  # the shrunk baseline's groups of four, over themselves
