"""The metrics of an update, by the names that `oblrpo train` gives them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from oblrpo import estimators
from oblrpo.adapters.metrics import baseline_metrics

if TYPE_CHECKING:
    from oblrpo.adapters.trl.gradient import WholeBatch


def finite(value: float) -> float:
    """The value, or NaN for infinity: TRL leaves NaN out of its averages, and JSON knows neither."""
    return value if math.isfinite(value) else math.nan


def batch_metrics(batch: WholeBatch) -> dict[str, float]:
    """What baselines, norms and tokens of a batch were like."""
    columns, valid_PG = batch.columns, batch.columns["valid"]
    norm2_PG = None if columns["norm2"].isnan().any() else columns["norm2"]
    return {
        "entropy": float(columns["entropy"].sum() / columns["length"].sum()),
        "completions/masked_ratio": 1 - float(valid_PG.double().mean()),
        **baseline_metrics(columns["reward"], valid_PG, columns["baseline"], norm2_PG),
        **({} if math.isnan(batch.agreement) else {"score_norm2/agreement_calibrated": batch.agreement}),
    }


def signal_metrics(schedule: estimators.SNRSchedule, moments: estimators.Moments, factor: float) -> dict[str, float]:
    """Signal and noise: averaged over steps as the schedule sees them, and this batch's own."""
    smoothed, (low, high) = schedule.smoothed, schedule.snr_interval()
    return {
        "lr_factor": factor,
        "snr": smoothed.snr,
        "snr_low": low,
        "snr_high": high,
        "n_snr": smoothed.n_snr,
        "critical_batch_size": smoothed.critical_batch_size,
        "signal2": moments.signal2,
        "trace_cov": moments.trace_cov,
    }
