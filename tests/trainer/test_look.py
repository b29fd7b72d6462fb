"""The figures of a look, from ledgers that are known."""

import math
from dataclasses import replace

import pytest

from oblrpo.errors import InputError
from oblrpo.estimators.ledger import Ledger, LedgerEntry
from oblrpo.settings import TrainConfig
from oblrpo.trainer import look as looking
from oblrpo.trainer.look import _summed_up, look
from tests.cli.conftest import _place_of_whole, dense_reward, oblrpo, run, whole

__all__ = ["_place_of_whole", "dense_reward", "oblrpo", "run", "whole"]


def seen_at(step, signals, run_n_snr=None):
    """The look at two batches of 32 prompts, for a run of 16."""
    batches = [
        (reward, Ledger({"rloo": LedgerEntry(4.0, signal), "oblr_shrunk": LedgerEntry(1.0, signal)}, 1.0))
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
    assert "the critical batch is 64 prompts" in str(seen)
    whose = "of this one policy (step 7); the run logged {} there, a mean over the policies of its last steps"
    assert whose.format("none") in str(seen)
    assert whose.format("0.31") in str(seen_at(7, (1.0, 3.0), 0.312))


def test_a_batch_may_be_as_large_as_is_said(run, monkeypatch):
    monkeypatch.setattr(looking, "MOST", 2 * 3)  # completions, of which a prompt has three
    assert look(run, prompts=2).prompts == 2
    with pytest.raises(InputError, match="--prompts is 3; a look at this run takes at most 2, each with 3 completions"):
        look(run, prompts=3)
