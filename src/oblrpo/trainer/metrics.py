"""What a step reports. Keys are TRL's where TRL has one."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from oblrpo.rollout import Rollouts
from oblrpo.tasks import Problem
from oblrpo.trainer.algorithm1 import Estimate, Update


def step_metrics(
    step: int, rollouts: Rollouts, rewards_PG: Tensor, updates: list[Update], tokens: int
) -> dict[str, Any]:
    """One line of metrics.jsonl.

    Statistics of the batch are those of the first update, on-policy; the rate is the last update's. `snr`, `n_snr` and
    `critical_batch_size` come from the averaged moments, as the schedule sees them; `signal2` and `trace_cov` are this
    batch's own.
    """
    estimate, last = updates[0].estimate, updates[-1]
    alone = rewards_PG.shape[1] == 1
    group_std_P = rewards_PG.new_zeros(rewards_PG.shape[0]) if alone else rewards_PG.std(1)
    baseline_P = estimate.baseline_PG.mean(1)
    return {
        "step": step,
        "reward": rewards_PG.mean().item(),
        "reward_std": group_std_P.mean().item(),
        "frac_reward_zero_std": math.nan if alone else (group_std_P == 0).float().mean().item(),
        "completions/mean_length": rollouts.sequences.lengths_S.float().mean().item(),
        "completions/clipped_ratio": rollouts.clipped_S.float().mean().item(),
        "entropy": estimate.entropy,
        "grad_norm": estimate.grad_norm2**0.5,
        "learning_rate": last.learning_rate,
        "lr_factor": last.factor,
        "snr": last.smoothed.snr,
        "snr_low": last.snr_interval[0],
        "snr_high": last.snr_interval[1],
        "n_snr": last.smoothed.n_snr,
        "critical_batch_size": last.smoothed.critical_batch_size,
        "signal2": estimate.moments.signal2,
        "trace_cov": estimate.moments.trace_cov,
        **_norms(estimate, rewards_PG),
        "baseline/mean": baseline_P.mean().item(),
        "baseline/spread": baseline_P.std().item(),
        "num_tokens": tokens,
        **({} if last.kl is None else {"step_kl": last.kl}),
        **estimate.further,
    }


def _norms(estimate: Estimate, rewards_PG: Tensor) -> dict[str, float]:
    if estimate.norm2_PG is None:
        return {}
    mean = estimate.norm2_PG.mean().item()
    return {"score_norm2/mean": mean, "score_norm2/kappa": kappa(estimate.norm2_PG, rewards_PG)}


def kappa(norm2_PG: Tensor, rewards_PG: Tensor) -> float:
    """E[w | F high] / E[w | F low], split halfway between the batch's least and greatest reward.

    For rewards of 0 and 1 that is E[w | F = 1] / E[w | F = 0]. NaN where all rewards are equal.
    """
    high_PG = rewards_PG > (rewards_PG.min() + rewards_PG.max()) / 2
    return (norm2_PG[high_PG].mean() / norm2_PG[~high_PG].mean()).item()


def completion_rows(
    problems: list[Problem], rollouts: Rollouts, rewards_PG: Tensor, estimate: Estimate
) -> list[dict[str, Any]]:
    """One record a completion, for `completions/step_N.jsonl`."""
    columns = {
        "reward": rewards_PG,
        "baseline": estimate.baseline_PG,
        "advantage": estimate.advantages_PG,
        "length": rollouts.sequences.lengths_S,
        "clipped": rollouts.clipped_S,
    }
    if estimate.norm2_PG is not None:
        columns["score_norm2"] = estimate.norm2_PG
    values = {key: column.flatten().tolist() for key, column in columns.items()}
    G = rewards_PG.shape[1]
    return [
        {"prompt": problems[s // G].text, "answer": problems[s // G].answer, "completion": text}
        | {key: column[s] for key, column in values.items()}
        for s, text in enumerate(rollouts.completions)
    ]
