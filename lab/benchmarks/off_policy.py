"""CPU seconds of a step with several updates on each batch, under every ratio, by `time.process_time`.

    python -m lab.benchmarks.off_policy [--runs ppo:2 gspo:4] [--rounds 8]

A run is `RATIO:UPDATES`: batches of 32 prompts x 4 completions of the task path, the shrunk baseline and the measured
rate. The runs take turns; printed is the median over rounds. What they learn is a part of `lab.results`: `several`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

from lab.benchmarks.runs import run_of
from lab.results.plan import DEFAULT, NO_EXTRAS, RATIOS
from oblrpo.policy import make_policy
from oblrpo.rewards import Rewards
from oblrpo.trainer.setup import make_learner
from oblrpo.trainer.task import task_of

SIZE = {"prompts_per_step": 32, "num_generations": 4}


def settings_of(run: str) -> dict:
    """The settings of a run that is written as RATIO:UPDATES."""
    ratio, _, updates = run.partition(":")
    several = {"num_iterations": int(updates), "ratio": ratio} if int(updates) > 1 else {}
    return {**DEFAULT, **NO_EXTRAS, **SIZE, **several, "learning_rate": 1e-5}


def main() -> None:
    """The command line."""
    every = ["sequence:1", *(f"{ratio}:{updates}" for updates in (2, 4) for ratio in RATIOS)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", default=every)
    parser.add_argument("--rounds", type=int, default=8, help="steps of each run that count")
    told = parser.parse_args()
    torch.set_num_threads(1)
    learners = {}
    for run in told.runs:
        config = run_of(Path("nowhere"), settings_of(run)).config
        task = task_of(config)
        learners[run] = task, make_learner(make_policy(config.policy), Rewards(task), config)
    spent: dict[str, list[float]] = {run: [] for run in learners}
    for step, (run, (task, learner)) in itertools.product(range(1, told.rounds + 2), learners.items()):
        begun = time.process_time()
        learner.step(task.train_batch(step, SIZE["prompts_per_step"]), step)
        spent[run].append(time.process_time() - begun)
    for run, each in spent.items():
        print(f"{run}\t{statistics.median(each[1:]):.3f}")


if __name__ == "__main__":
    main()
