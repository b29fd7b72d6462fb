"""The metrics of a step. Their names are those of TRL where TRL has the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators import kappa
from oblrpo.step import Update
from oblrpo.step.algorithm1 import NO_SIGNAL
from oblrpo.tasks import Problem
from oblrpo.trainer.learner import StepResult


def step_metrics(number: int, step: StepResult, tokens: int) -> dict[str, Any]:
    """Return one line of metrics.jsonl.

    Statistics of the batch are those of the first update, on-policy; the rate is that of the last update that was
    made, as later ones may have no gradient left that is not clipped. `snr`, `n_snr` and `critical_batch_size` come
    from the averaged moments, as the schedule sees them; `signal2` and `trace_cov` are this batch's own. Without an
    update the rate is 0, and metrics of the gradient are NaN. `tokens` went through the model in all steps so far.
    """
    sampled, rollouts = step.all_samples or step.samples, step.samples.rollouts
    rewards_PG, valid_PG, sequences = sampled.rewards_PG, sampled.valid_PG, rollouts.sequences
    group_std_P, rewards_N = _group_std(rewards_PG, valid_PG), rewards_PG[valid_PG]
    marks = rewards_N.quantile(rewards_N.new_tensor([0, 0.25, 0.75, 1])).tolist() if len(rewards_N) else [math.nan] * 4
    return {
        "step": number,
        "reward": rewards_N.mean().item(),
        "reward_stderr": _stderr(rewards_PG, valid_PG),
        "reward_std": group_std_P.mean().item(),
        "reward_min": marks[0],
        "reward_max": marks[3],
        "reward_iqr": marks[2] - marks[1],
        "frac_reward_zero_std": math.nan if rewards_PG.shape[1] == 1 else (group_std_P == 0).float().mean().item(),
        "completions/mean_length": sequences.lengths_S.float().mean().item(),
        "completions/clipped_ratio": rollouts.clipped_S.float().mean().item(),
        "completions/masked_ratio": 1 - valid_PG.float().mean().item(),
        **({} if step.kl_PG is None else {"kl": (step.kl_PG.sum() / sequences.lengths_S.sum()).item()}),
        **({} if step.rounds is None else {"num_gen_batches": step.rounds}),
        **(_update_metrics(step.updates) if step.updates else NO_UPDATE),
        **({"frac_prompts_masked": math.nan} if step.skipped and not step.updates else {}),
        **({} if step.entropy is None else _without_signal(step.entropy, valid_PG)),
        "skipped": float(bool(step.skipped) or step.entropy is not None),
        "num_tokens": tokens,
    }


NO_UPDATE = dict.fromkeys(
    ("entropy", "grad_norm", "snr", "snr_low", "snr_high", "n_snr", "critical_batch_size", "signal2", "trace_cov",
     "baseline/mean", "baseline/spread"), math.nan
) | {"learning_rate": 0.0, "lr_factor": 0.0, "frac_prompts_masked": 1.0,
     "completions/trained_ratio": 0.0}  # fmt: skip


def _without_signal(entropy: float, valid_PG: Tensor) -> dict[str, float]:
    """What a step says in which no reward differed from another."""
    masked = 1 - valid_PG.any(1).float().mean().item()
    return NO_SIGNAL | {"grad_norm": 0.0, "frac_prompts_masked": masked, "entropy": entropy}


def _update_metrics(updates: list[Update]) -> dict[str, Any]:
    first, gradient = updates[0], updates[0].gradient
    last = next((update for update in reversed(updates) if update.gradient.norm2), first)
    valid_PG, part_P = gradient.batch.valid_PG, gradient.batch.part_P
    baseline_P = torch.where(valid_PG, gradient.baseline_PG, 0).sum(1)[part_P] / valid_PG.sum(1)[part_P]
    norms = {}
    if gradient.norm2_PG is not None:
        norm2_N, rewards_N = gradient.norm2_PG[valid_PG], gradient.batch.rewards_PG[valid_PG]
        norms = {"score_norm2/mean": norm2_N.mean().item(), "score_norm2/kappa": kappa(norm2_N, rewards_N)}
    return {
        "completions/trained_ratio": gradient.trained_share,
        "entropy": gradient.entropy,
        "grad_norm": gradient.norm2**0.5,
        "learning_rate": last.learning_rate,
        "lr_factor": last.factor,
        "snr": last.smoothed.snr,
        "snr_low": last.snr_interval[0],
        "snr_high": last.snr_interval[1],
        "n_snr": last.smoothed.n_snr,
        "critical_batch_size": last.smoothed.critical_batch_size,
        "signal2": gradient.moments.signal2,
        "trace_cov": gradient.moments.trace_cov,
        **norms,
        "baseline/mean": baseline_P.mean().item(),
        "baseline/spread": baseline_P.std().item(),
        "frac_prompts_masked": 1 - part_P.float().mean().item(),
        **({} if last.kl is None else {"step_kl": last.kl, "step_kl_target": last.target_kl}),
        **first.further,
    }


def part_metrics(earned: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each reward and its standard deviation (n - 1) over all completions that it applies to, as in TRL."""
    metrics = {}
    for name, values in earned.items():
        values_N = torch.tensor(values, dtype=torch.float64, device="cpu")
        metrics[f"rewards/{name}/mean"] = values_N.mean().item()
        metrics[f"rewards/{name}/std"] = values_N.std().item() if len(values) > 1 else math.nan
    return metrics


def _stderr(rewards_PG: Tensor, valid_PG: Tensor) -> float:
    """The standard error of the mean reward over prompts, whose completions are not independent.

    With r_p the sum of a prompt's valid rewards less the mean and n their number: sqrt(P / (P - 1) sum_p r_p^2) / n,
    P counting prompts with a valid reward. NaN of fewer than two of them.
    """
    part_P, n = valid_PG.any(1), valid_PG.sum()
    residual_PG = torch.where(valid_PG, rewards_PG - rewards_PG[valid_PG].mean(), 0)
    P = part_P.sum().item()
    return math.nan if P < 2 else (residual_PG.sum(1).norm() / n * math.sqrt(P / (P - 1))).item()


def _group_std(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """The standard deviation (G - 1) of every prompt with at least two valid rewards; 0 of one completion a prompt."""
    if rewards_PG.shape[1] == 1:
        return rewards_PG.new_zeros(rewards_PG.shape[0])
    if valid_PG.all():
        return rewards_PG.std(1)
    groups = (row[valid] for row, valid in zip(rewards_PG, valid_PG, strict=True))
    stds = [group.std() for group in groups if len(group) > 1]
    return torch.stack(stds) if stds else rewards_PG.new_full((1,), math.nan)


def completion_rows(problems: list[Problem], step: StepResult) -> list[dict[str, Any]]:
    """One record a completion, for `completions/step_N.jsonl`; None stands for what a masked completion lacks."""
    samples, gradient = step.samples, step.updates[0].gradient if step.updates else None
    baseline_PG = advantages_PG = nothing_PG = torch.full_like(samples.rewards_PG, math.nan)
    if gradient is not None:
        counted_PG = gradient.batch.valid_PG
        baseline_PG = torch.where(counted_PG, gradient.baseline_PG, nothing_PG)
        advantages_PG = torch.where(counted_PG, gradient.advantages_PG, nothing_PG)
    columns = {
        "reward": torch.where(samples.valid_PG, samples.rewards_PG, nothing_PG),
        "baseline": baseline_PG,
        "advantage": advantages_PG,
        "length": samples.rollouts.sequences.lengths_S,
        "clipped": samples.rollouts.clipped_S,
    }
    if gradient is not None and gradient.norm2_PG is not None:
        columns["score_norm2"] = gradient.norm2_PG
    if step.kl_PG is not None:
        columns["kl"] = step.kl_PG
    values = {
        key: [None if math.isnan(value) else value for value in column.flatten().tolist()]
        for key, column in columns.items()
    }
    G = samples.rewards_PG.shape[1]
    return [
        {"prompt": problems[s // G].text, "answer": problems[s // G].answer, "completion": text}
        | {key: column[s] for key, column in values.items()}
        for s, text in enumerate(samples.rollouts.completions)
    ]
