"""Runs as they lie on the disk, whose figures are known."""

import json
from functools import partial

import pytest

from oblrpo.settings import TrainConfig, flatten, yaml_text

P, G = 4, 2


def row(step, **metrics):
    """A step of a run with all that the page draws."""
    usual = {
        "step": step, "reward": 0.2 + 0.01 * step, "reward_stderr": 0.05, "reward_std": 0.3,
        "frac_reward_zero_std": 0.4, "completions/mean_length": 5.0, "completions/distinct_ratio": 0.7,
        "completions/clipped_ratio": 0.0,
        "completions/masked_ratio": 0.0, "entropy": 0.7, "grad_norm": 1.0, "learning_rate": 1e-3, "lr_factor": 0.5,
        "snr": 0.05, "snr_low": 0.0, "snr_high": 0.1, "n_snr": 0.2, "critical_batch_size": 20.0,
        "score_norm2/mean": 1000.0, "score_norm2/kappa": 0.4, "num_tokens": 99, "step_time": 0.5,
    }  # fmt: skip
    return usual | metrics


def completions(reward=lambda number: number % 2):
    """Two completions of each of four prompts."""
    return [
        {"prompt": f"prompt {s // G}", "answer": "42", "completion": f"<b>text {s}</b>", "reward": reward(s),
         "baseline": 0.25, "advantage": reward(s) - 0.25, "length": 3 + s, "clipped": False,
         "score_norm2": 10.0 * (s + 1)}
        for s in range(P * G)
    ]  # fmt: skip


def write_run_into(folder, rows, texts=None, name="run", **settings):
    """Write a run's folder into another; returns its path."""
    run = folder / name
    (run / "completions").mkdir(parents=True, exist_ok=True)
    config = flatten(TrainConfig()) | {"prompts_per_step": P, "num_generations": G, "steps": 10} | settings
    (run / "config.yaml").write_text(yaml_text(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for step, found in (texts or {}).items():
        lines = "".join(json.dumps(each) + "\n" for each in found)
        (run / "completions" / f"step_{step}.jsonl").write_text(lines)
    return run


@pytest.fixture
def write_run(tmp_path):
    """`write_run_into` this test's folder."""
    return partial(write_run_into, tmp_path)
