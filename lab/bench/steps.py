"""What a step of a run costs over a plain forward and backward of the same completions, in CPU seconds.

    python -m lab.bench.steps [--shapes short medium long] [--rounds 9] [--algorithms oblrpo_thrifty rloo]

A step is the run's own (`step.Learner`): weights, baseline, advantages, gradient, signal and noise, and looks as they
come, in steps 11 to 20 of a run; rewards are random, so that every completion is trained on. `update` adds the rate,
the update and what measures it, over a plain step with the same optimizer's. Sampling is in neither. Ratios are taken
in each round, in which all have their turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from lab.bench.workload import SHAPES, Workload, build
from oblrpo.estimators import Moments
from oblrpo.memory import keep_freed
from oblrpo.policy import Policy, Sequences, byte_tokenizer
from oblrpo.rollout import Rollouts
from oblrpo.settings import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Gradient, Samples, Update
from oblrpo.trainer.setup import make_learner

GROUPS = {"short": 4, "medium": 8, "long": 2}
"""Completions of a prompt: a step takes two prompts or more."""
STEPS = 10


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


def measure(shape: str, algorithms: list[str], rounds: int) -> dict[str, list[float]]:
    """Ratios by round, of each algorithm, without and with its update."""
    workload = build(replace(SHAPES[shape], group_size=GROUPS[shape]))
    runs = {name: prepared(workload, name) for name in algorithms}
    optimizer = torch.optim.AdamW(workload.parameters, lr=1e-9)
    found: dict[str, list[float]] = {}

    def plain(update: bool = False) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            (workload.logps() * workload.coef_S).sum().backward()
            if update:
                optimizer.step()

    plain(update=True)
    for number in range(rounds + 1):
        once, updated = seconds(plain), seconds(lambda: plain(update=True))
        for name, (gradient, step) in runs.items():
            ratios = seconds(gradient) / once, seconds(step) / updated
            for label, ratio in zip((name, f"{name}, update"), ratios, strict=True):
                found.setdefault(label, []).extend([ratio] if number else [])  # the first warms up
    return found


def prepared(workload: Workload, algorithm: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Ten steps of a run on the workload's completions: up to the gradient, and with the update."""
    G, (S, T) = workload.group_size, workload.ids_ST.shape
    config = TrainConfig(
        rollout=RolloutConfig(prompts_per_step=S // G, num_generations=G, max_completion_length=T - 1),
        algorithm=AlgorithmConfig(algorithm=algorithm),
        optim=OptimConfig(learning_rate=1e-9, schedule="auto"),
        scores=ScoresConfig(ledger_steps=0),
    )
    policy = Policy(workload.model, byte_tokenizer())
    learner = make_learner(policy, lambda *_: ([], []), config)  # type: ignore[arg-type]
    ones_ST = torch.ones_like(workload.ids_ST)
    sequences = Sequences.of(workload.ids_ST[:, :1], ones_ST[:, :1], workload.ids_ST[:, 1:], ones_ST[:, 1:])
    with torch.no_grad():
        features = policy.logps(sequences).features
    rollouts = Rollouts(sequences, [""] * S, torch.zeros(S, dtype=torch.bool), features=features)
    rewards_PG = workload.rewards_S.view(-1, G)
    samples = Samples(rollouts, rewards_PG, torch.ones_like(rewards_PG, dtype=torch.bool))
    update, number = learner.update, iter(range(1, 1 << 30))

    def stand_in(gradient: Gradient, moments: Moments, fresh: bool = True) -> Update:
        return Update(gradient, moments, 0.0, 0.0, moments, (0.0, 0.0), None)

    def steps(with_update: bool) -> None:
        learner.update = update if with_update else stand_in  # type: ignore
        for _ in range(STEPS):
            learner.learn(samples, next(number))

    steps(True)  # its looks are those of the first steps
    return lambda: steps(False), lambda: steps(True)


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--algorithms", nargs="+", default=["oblrpo_thrifty", "rloo"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed()
    print("| completions x tokens | step | over plain, CPU s | least and most |\n|---|---|---|---|")
    for shape in args.shapes:
        for label, ratios in measure(shape, args.algorithms, args.rounds).items():
            size = f"{SHAPES[shape].sequences} x {SHAPES[shape].tokens}"
            print(
                f"| {size} | {label} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
