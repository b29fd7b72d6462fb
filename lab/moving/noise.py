"""The signal-to-noise ratio of a policy that moves: M1, M2, M5, M11."""

from __future__ import annotations

import math
from typing import Any

import torch

from lab.moving.place import Figures, Place, Trained, mean
from oblrpo.rewards import Rewards
from oblrpo.runs import RunFolder
from oblrpo.runs.state_files import load_state
from oblrpo.seeds import seed_of
from oblrpo.trainer.setup import load_checkpoint, make_learner
from oblrpo.trainer.task import task_of

FAR = 3_000_000
"""Batches of frozen policies are those of steps from this one on, which no run reaches."""
PAPER: dict[str, Any] = {"algorithm": "oblrpo", "schedule": "debiased", "learning_rate": 6e-3}


def solved_by_the_paper(at: Place) -> Figures:
    """M1: the paper's rate on a reward that is learned within 20 steps."""
    run = at.train("run", **PAPER)
    n_snr = run.column("n_snr", 41, 60)
    made = [factor for factor in run.column("lr_factor", 41, 60) if factor > 0]
    return {
        "N SNR at the end": n_snr[-1],
        "mean of the last 20 steps": mean(n_snr),
        "rate / eta_0 of the last update in them": made[-1] if made else 0.0,
        "updates in them": len(made),
        "reward": mean(run.column("reward", 56, 60)),
    }


def solved_by_default(at: Place) -> Figures:
    """M2: the default on the same reward."""
    run = at.train("run", steps=80)
    return {
        "N SNR, steps 28 to 33": mean(run.column("n_snr", 28, 33)),
        "at the end": mean(run.column("n_snr", 80, 80)),
        "reward": mean(run.column("reward", 76, 80)),
    }


LETTERS = "abcdefghijklmnop"


def own_letter(_: int, completions: list[str], columns: dict[str, list[Any]]) -> list[float]:
    """The share of the letter that the prompt asks for."""
    return [text.count(letter) / 16 for text, letter in zip(completions, columns["letter"], strict=True)]


def few_prompts(at: Place) -> Figures:
    """M5: a task of 8 or 16 prompts, 8 a step, each with a letter of its own; the paper's rate, and a fixed one."""
    found: Figures = {}
    for count in (8, 16):
        data, other = (
            [
                {"prompt": f"Describe {first + number} in a word: ", "part": part, "letter": LETTERS[number]}
                for number in range(count)
            ]
            for part, first in (("train", 0), ("held out", 9000))
        )
        given = {"data": data, "eval_data": other, "eval_prompts": 8, "prompts_per_step": 8, "num_generations": 16}
        for name, rule in {"debiased": PAPER, "off": PAPER | {"schedule": "off"}}.items():
            run = at.train(f"{count}_{name}", own_letter, steps=90, **given, **rule)
            found[f"{count} prompts, {name}"] = mean(run.column("reward", 86, 90))
            found[f"{count} prompts, {name}: N SNR half-way"] = mean(run.column("n_snr", 41, 50))
    return found


def frozen(run: Trained, step: int, batches: int) -> float:
    """N SNR of the policy after a step: the mean signal over the mean noise of batches that nothing is learned from."""
    config, objects, folder = RunFolder(run.run.output).saved_config(), run.run._objects, run.checkpoint(step)
    task, policy = task_of(config, objects), load_checkpoint(folder, config)
    rewards = Rewards(task, config.task.rewards, functions=objects.functions)
    learner = make_learner(policy, rewards, config, rows=getattr(task, "rows", None))
    learner.load_state_dict(load_state(folder), str(folder))
    P, taken = config.rollout.prompts_per_step, []
    for number in range(batches):
        torch.manual_seed(seed_of(config.run.seed, FAR + number))
        samples = learner.sample(task.train_batch(FAR + number, P))
        batch, past = learner.batch(samples), learner.baseline
        weight_PG = past.by_proxy(samples.features).view_as(batch.rewards_PG)
        baseline_PG = past.begin().of(batch.rewards_PG, batch.valid_PG, batch.own_PGT, weight_PG)
        weights = learner.weights(samples)
        gradient = learner.gradient(batch, baseline_PG, weights)
        look = learner.looks.at(batch, batch.count_P.nonzero().flatten())
        taken.append(learner.moments(gradient, look, weights))
    noise = mean([moments.trace_cov for moments in taken])
    return P * mean([moments.signal2 for moments in taken]) / noise if noise > 0 else math.nan


def intervals(at: Place, steps: tuple[int, ...] = (5, 10, 15, 20, 25, 30), batches: int = 60) -> Figures:
    """M11: does the interval of N SNR that a run shows hold the N SNR of its policy at that step?"""
    run, found, covered, known = at.train("run", steps=steps[-1], save_steps=steps[0]), Figures(), 0, 0
    for step in steps:
        (low,), (high,), (shown,) = (run.column(name, step, step) for name in ("snr_low", "snr_high", "n_snr"))
        low, high, true = 32 * low, 32 * high, frozen(run, step, batches)
        if math.isfinite(true):
            known += 1
            covered += low <= true <= high
        found |= {f"(step {step}: shown)": shown, f"(step {step}: low)": low, f"(step {step}: high)": high}
        found[f"(step {step}: frozen)"] = true
    return {"points covered": covered, "of": known} | found
