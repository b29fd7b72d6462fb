"""The figures of a look, from ledgers that are known."""

import math
from dataclasses import replace

import pytest

from oblrpo.errors import InputError
from oblrpo.estimators.ledger import Ledger, LedgerEntry
from oblrpo.intervals import Mean
from oblrpo.settings import TrainConfig
from oblrpo.trainer import look as looking
from oblrpo.trainer.look import BATCHES, FIRST_STEP, LookReport, _Batch, _summed_up, look
from tests.cli.conftest import _place_of_whole, dense_reward, oblrpo, run, whole

__all__ = ["_place_of_whole", "dense_reward", "oblrpo", "run", "whole"]


def entry(variance, signal2):
    return LedgerEntry(variance, signal2, math.nan, math.nan, math.nan)


def seen_at(step, signals, run_n_snr=None):
    """The look at two batches of 32 prompts, for a run of 16."""
    batches = [
        _Batch(reward, Ledger({"rloo": entry(4.0, signal), "oblr_shrunk": entry(1.0, signal)}, 1.0), 0.5)
        for reward, signal in zip((0.2, 0.4), signals, strict=True)
    ]
    config = TrainConfig()
    algorithm = replace(config.algorithm, algorithm="rloo")
    rollout = replace(config.rollout, prompts_per_step=16, num_generations=4)
    return _summed_up(batches, step, 32, replace(config, algorithm=algorithm, rollout=rollout), run_n_snr)


def test_the_look_of_batches_that_are_known():
    """One prompt has the noise 32 x 4 = 128, so that 2 / 128 is its SNR."""
    seen = seen_at(7, (1.0, 3.0))
    assert seen.n_snr == pytest.approx(16 * 2 / 128)
    assert seen.critical == pytest.approx(64)
    assert (seen.n_snr_low, seen.reward.value, seen.between.value) == (0.0, pytest.approx(0.3), 0.25)
    assert seen.n_snr_high == pytest.approx(seen.n_snr * (1 + 12.706 * math.sqrt(2) / math.sqrt(2) / 2), rel=1e-3)
    assert seen.variance["oblr_shrunk"].value == pytest.approx(0.25)
    assert (seen.depends, seen.length.value) == (False, 0.5)
    assert "the critical batch is 64 prompts" in str(seen)
    whose = "of this one policy (step 7); the run logged {} there, a mean over the policies of its last steps"
    assert whose.format("none") in str(seen)
    assert whose.format("0.31") in str(seen_at(7, (1.0, 3.0), 0.312))


def test_the_mean_over_policies_takes_what_is_negative_by_chance_as_it_is():
    """N SNR .25, -.125 and .5, a mean of .208; with 0 for the second it would be .25."""
    looks = LookReport((seen_at(30, (1.0, 3.0)), seen_at(20, (-2.0, 0.0)), seen_at(10, (4.0, 4.0), 0.2)), 3)
    assert [look.n_snr for look in looks.policies] == pytest.approx([0.25, 0.0, 0.5])
    margin = 4.30265 * math.sqrt(0.0989583 / 3)  # Student's t of 2 degrees of freedom, variance (n - 1)
    assert (looks.n_snr.value, looks.n_snr.margin) == (pytest.approx(0.625 / 3), pytest.approx(margin, rel=1e-4))
    lines = str(looks).splitlines()
    assert [line.split(";")[0] for line in lines[1:4]] == [
        "  step 30     N SNR 0.25 (0 to 1.8)",
        "  step 20     N SNR 0 (0 to 1.5)",
        "  step 10     N SNR 0.5 (0.5 to 0.5)",
    ]
    assert [line.rpartition(" ")[2] for line in lines[1:4]] == ["none", "none", "0.2"]
    mean = "  mean        N SNR 0.21 (0 to 0.99); the critical batch is 77 prompts (16 or more)"
    assert lines[4] == f"{mean}; 95 % interval over policies"
    assert str(looks).endswith(f"\n\n{looks.policies[0]}")
    plain = looks.plain()
    assert plain["mean_critical_batch_size"] == pytest.approx(76.8)
    assert [each["step"] for each in plain["checkpoints"]] == [30, 20, 10]
    assert plain["step"] == 30


def test_fewer_checkpoints_than_requested_are_reported_in_a_line():
    newest = seen_at(30, (1.0, 3.0))
    assert str(LookReport((newest,), 1)) == str(newest)
    assert str(LookReport((newest,), 4)) == (
        "Only 1 of the 4 requested checkpoints are there, undamaged (oblrpo train --save-total-limit keeps more)."
        f"\n\n{newest}"
    )
    nothing = LookReport((seen_at(30, (-1.0, -3.0)), seen_at(20, (-1.0, -3.0))), 2)
    assert nothing.plain()["mean_critical_batch_size"] is None
    assert "mean        N SNR 0 (0 to 0); no signal is above the noise" in str(nothing)


def test_every_policy_has_prompts_of_its_own_and_a_batch_may_be_as_large_as_is_said(run, monkeypatch):
    """Those of shared prompts would err together, and the interval of their mean would be too narrow."""
    asked = []

    class Watched:
        def __init__(self, task):
            self.task = task

        def __getattr__(self, name):
            return getattr(self.task, name)

        def train_batch(self, step, count):
            asked.append((step, count))
            return self.task.train_batch(step, count)

    made = looking.task_of
    monkeypatch.setattr(looking, "task_of", lambda config: Watched(made(config)))
    monkeypatch.setattr(looking, "MOST", 2 * 3)  # completions, of which a prompt has three
    assert len(look(run, prompts=2, checkpoints=2).policies) == 2
    assert asked == [(FIRST_STEP + number, 2) for number in range(2 * BATCHES)]
    with pytest.raises(InputError, match="--prompts is 3; a look at this run takes at most 2, each with 3 completions"):
        look(run, prompts=3)


@pytest.mark.parametrize(
    ("mean", "words"),
    [
        (Mean(0.95, 0.02, 4), "a good proxy"),
        (Mean(0.95, 0.08, 4), "perhaps a good proxy"),
        (Mean(0.85, 0.08, 4), "perhaps a good proxy"),
        (Mean(0.85, 0.02, 4), "a poor proxy"),
        (Mean(0.95, None, 1), "in one batch only, too few to say"),
    ],
)
def test_a_proxy_is_good_or_poor_where_its_whole_interval_is(mean, words):
    seen = str(replace(seen_at(7, (1.0, 3.0)), length=mean))
    assert words in next(line for line in seen.splitlines() if line.startswith("  length "))
    assert ("perhaps" in seen) == ("perhaps" in words)
