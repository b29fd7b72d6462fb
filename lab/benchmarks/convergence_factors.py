"""Theorem 4's factor over a long run: what it is, and what `debiased` and `plugin` take it for.

    python -m lab.benchmarks.convergence_factors [--world sparse --rate 1000] [--optimizer SGD] [--prompts 16]

One of `lab.benchmarks.convergence`'s policies is trained under `debiased`. After 1/16, 1/8, 1/4, 1/2 and all of the
steps the true factor S / (S + T / N) is taken from 16,384 fresh prompts, and beside it stand the factors of the 200
steps before: the mean of `debiased`, its standard deviation, how often it is 0, and the mean that `plugin` would have.
Means over seeds.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from lab.benchmarks.crowd import WORLDS, Crowd, optimizer_of
from oblrpo.estimators import SNRSchedule, moments

FRESH = 16_384
WINDOW = 200
COLUMNS = ("expected reward", "true factor", "debiased", "its deviation", "zeros", "plugin")


def true_factor(crowd: Crowd, N: int) -> float:
    """S / (S + T / N) of the policy as it is, from many prompts; its own random numbers go on as they were."""
    state = crowd.random.get_state()
    norm2_KP, norm2_K, _ = crowd.ascend(FRESH)
    crowd.random.set_state(state)
    found = moments(norm2_KP[0], norm2_K[0])
    return found.signal2 / (found.signal2 + found.trace_cov / N)


def course(args: argparse.Namespace, seed: int) -> list[tuple[float, ...]]:
    """The columns at every mark of a run."""
    crowd = Crowd(args.world, seed, 1)
    rows: list[tuple[float, ...]] = []
    schedule = SNRSchedule(optimizer_of(args.optimizer, crowd.weights, args.rate), "debiased")
    debiased: list[float] = []
    plugin: list[float] = []
    for t in range(1, args.steps + 1):
        norm2_KP, norm2_K, _ = crowd.ascend(args.prompts)
        debiased.append(schedule.step(moments(norm2_KP[0], norm2_K[0])))
        plugin.append(schedule.average.signal_share(False))
        schedule.optimizer.step()
        if t in (args.steps // share for share in (16, 8, 4, 2, 1)):
            last = debiased[-WINDOW:]
            spread = (statistics.mean(last), statistics.pstdev(last), statistics.mean(f == 0 for f in last))
            row = (float(crowd.expected_K()), true_factor(crowd, args.prompts), *spread)
            rows.append((*row, statistics.mean(plugin[-WINDOW:])))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", choices=list(WORLDS), default="sparse")
    parser.add_argument("--optimizer", choices=["SGD", "AdamW"], default="SGD")
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    args = parser.parse_args()
    torch.set_num_threads(1)
    courses = [course(args, seed) for seed in args.seeds]
    print("| steps | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    for share, rows in zip((16, 8, 4, 2, 1), zip(*courses, strict=True), strict=True):
        means = (f"{statistics.mean(column):.4f}" for column in zip(*rows, strict=True))
        print(f"| {args.steps // share} | " + " | ".join(means) + " |")


if __name__ == "__main__":
    main()
