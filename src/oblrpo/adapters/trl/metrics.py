"""The metrics of an update, by the names that `oblrpo train` gives them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from oblrpo import estimators

if TYPE_CHECKING:
    from oblrpo.adapters.trl.gradient import WholeBatch


def finite(value: float) -> float:
    """The value, or NaN for infinity: TRL leaves NaN out of its averages, and JSON knows neither."""
    return value if math.isfinite(value) else math.nan


def batch_metrics(batch: WholeBatch) -> dict[str, float]:
    """What baselines, norms and tokens of a batch were like."""
    columns = batch.columns
    valid_S = columns["valid"].bool()
    valid_PG, baseline_PG = (column_S.view(-1, batch.group_size) for column_S in (valid_S, columns["baseline"]))
    part_P = valid_PG.any(1)
    baseline_P = torch.where(valid_PG, baseline_PG, 0).sum(1)[part_P] / valid_PG.sum(1)[part_P]
    metrics = {
        "entropy": float(columns["entropy"].sum() / columns["length"].sum()),
        "completions/masked_ratio": 1 - float(valid_S.double().mean()),
        "baseline/mean": float(baseline_P.mean()),
        "baseline/spread": float(baseline_P.std()) if len(baseline_P) > 1 else math.nan,
    }
    if not bool(columns["norm2"].isnan().any()) and bool(valid_S.any()):
        norm2_S, rewards_S = columns["norm2"][valid_S], columns["reward"][valid_S]
        metrics["score_norm2/mean"] = float(norm2_S.mean())
        metrics["score_norm2/kappa"] = estimators.kappa(norm2_S, rewards_S)
    if not math.isnan(batch.agreement):
        metrics["score_norm2/agreement_calibrated"] = batch.agreement
    return metrics


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
