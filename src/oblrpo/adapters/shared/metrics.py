"""The metrics of an update, by the names that `oblrpo train` gives them."""

from __future__ import annotations

import math

from torch import Tensor

from oblrpo import estimators


def finite(value: float) -> float:
    """The value, or NaN for infinity: TRL leaves NaN out of its averages, and JSON knows neither."""
    return value if math.isfinite(value) else math.nan


def signal_metrics(schedule: estimators.SNRSchedule, batch: estimators.Moments | None) -> dict[str, float]:
    """Signal and noise: averaged over steps as the schedule sees them, and this batch's own where it has any."""
    smoothed = schedule.smoothed
    return {
        "snr": smoothed.snr,
        "n_snr": smoothed.n_snr,
        "critical_batch_size": smoothed.critical_batch_size,
        **({} if batch is None else {"signal2": batch.signal2, "trace_cov": batch.trace_cov}),
    }


def baseline_metrics(
    rewards_PG: Tensor, valid_PG: Tensor, baseline_PG: Tensor, norm2_PG: Tensor | None
) -> dict[str, float]:
    """Mean and spread over prompts of the prompts' mean baselines, and the score norms where they are known."""
    part_P = valid_PG.any(1)
    baseline_P = baseline_PG.masked_fill(~valid_PG, 0).sum(1)[part_P] / valid_PG.sum(1)[part_P]
    metrics = {
        "baseline/mean": float(baseline_P.mean()),
        "baseline/spread": float(baseline_P.std()) if len(baseline_P) > 1 else math.nan,
    }
    if norm2_PG is not None and len(baseline_P):
        metrics["score_norm2/mean"] = float(norm2_PG[valid_PG].mean())
        metrics["score_norm2/kappa"] = estimators.kappa(norm2_PG[valid_PG], rewards_PG[valid_PG])
    return metrics
