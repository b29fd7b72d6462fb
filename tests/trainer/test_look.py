"""The figures of a look, from ledgers that are known."""

import math
from dataclasses import replace

import pytest

from oblrpo.estimators.ledger import Ledger, LedgerEntry
from oblrpo.settings import TrainConfig
from oblrpo.trainer.look import _Batch, _summed_up


def entry(variance, signal2):
    return LedgerEntry(variance, signal2, math.nan, math.nan, math.nan)


def test_the_look_of_batches_that_are_known():
    """Batches of 32 prompts, a run of 16: one prompt has the noise 32 x 4 = 128, so that 2 / 128 is its SNR."""
    batches = [
        _Batch(reward, Ledger({"rloo": entry(4.0, signal), "oblr_shrunk": entry(1.0, signal)}, 1.0), 0.5)
        for reward, signal in ((0.2, 1.0), (0.4, 3.0))
    ]
    config = TrainConfig()
    algorithm = replace(config.algorithm, algorithm="rloo")
    rollout = replace(config.rollout, prompts_per_step=16, num_generations=4)
    seen = _summed_up(batches, 7, 32, replace(config, algorithm=algorithm, rollout=rollout))
    assert seen.n_snr == pytest.approx(16 * 2 / 128)
    assert seen.critical == pytest.approx(64)
    assert (seen.n_snr_low, seen.reward.value, seen.between.value) == (0.0, pytest.approx(0.3), 0.25)
    assert seen.n_snr_high == pytest.approx(seen.n_snr * (1 + 12.706 * math.sqrt(2) / math.sqrt(2) / 2), rel=1e-3)
    assert seen.variance["oblr_shrunk"].value == pytest.approx(0.25)
    assert (seen.depends, seen.length.value) == (False, 0.5)
    assert "the critical batch is 64 prompts" in str(seen)
