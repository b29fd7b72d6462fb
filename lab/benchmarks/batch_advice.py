"""Is what is said about the batch size true? Progress that is known exactly, against what was promised.

    python -m lab.benchmarks.batch_advice [--worlds sparse graded] [--seeds 16] [--trained 0 100]

What `diagnosis.next_steps` says of a batch rests on theorem 4: with N prompts over a critical batch of N* a step gains
in proportion to N / (N + N*), "at the rate that the batch supports". The small policies of `lab.benchmarks.rate_rules`
know their expected reward exactly. Each is trained for a number of steps, the critical batch there is measured on
65,536 prompts, and from that checkpoint batches of a half, once, twice and four times the critical one are tried:
- `SGD, one step`: the theorem's own case, a single step along the gradient;
- `AdamW, 20 steps`: what people do, from the optimizer's state at the checkpoint.
Every batch size gets the rate that is best for it, of a grid of factors 1.5, in the mean over seeds. Printed are the
mean progress of a step over that of the critical batch, with a 95 % interval, seed by seed, beside what was promised.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lab.benchmarks.rate_rules import WORLDS, World
from oblrpo.intervals import mean

SHARES = (0.5, 1.0, 2.0, 4.0)
RATIO = 1.5
LARGE = 65536
AT_ONCE = 2048
TRAINED_AT = 0.05
STEPS = 20

Progress = Callable[[int, int], list[float]]
"""What a batch of so many prompts gains with a seed, at every rate of the grid."""


class Checkpoint:
    """A policy of the laboratory after some training, with its optimizer, to begin from again and again."""

    def __init__(self, name: str, trained: int) -> None:
        self.world = World(name, 0)
        optimizer = self._optimizer(TRAINED_AT)
        for _ in range(trained):
            self.world.gradient(64)
            optimizer.step()
        self.weights, self.state = self.world.weights.detach().clone(), copy.deepcopy(optimizer.state_dict())
        self.reward = self.world.expected_reward()

    def _optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([self.world.weights], lr=rate, weight_decay=0.0)

    def critical_batch(self) -> float:
        """The prompts at which noise equals signal, tr Cov / ||grad J||^2, from a very large batch."""
        signal, noise, count = torch.zeros_like(self.weights), 0.0, LARGE // AT_ONCE
        for _ in range(count):
            measured, _ = self.world.gradient(AT_ONCE)
            signal, noise = signal + self._gradient() / count, noise + measured.trace_cov / count
        return noise / (float(signal.square().sum()) - noise / LARGE)

    def _gradient(self) -> Tensor:
        gradient = self.world.weights.grad
        assert gradient is not None
        return gradient

    def _back(self, seed: int) -> None:
        with torch.no_grad():
            self.world.weights.copy_(self.weights)
        self.world.random.manual_seed(seed)

    def one_step(self, rates: Sequence[float]) -> Progress:
        """A single step of SGD at every rate along one gradient."""

        def progress(P: int, seed: int) -> list[float]:
            self._back(seed)
            self.world.gradient(P)
            return [self._gain_at(self.weights - rate * self._gradient()) for rate in rates]

        return progress

    def many_steps(self, rates: Sequence[float]) -> Progress:
        """The mean gain of steps of AdamW, which goes on where training stopped, at every rate."""

        def progress(P: int, seed: int) -> list[float]:
            gains = []
            for rate in rates:
                self._back(seed)
                optimizer = self._optimizer(rate)
                if self.state["state"]:
                    optimizer.load_state_dict(
                        {**copy.deepcopy(self.state), "param_groups": optimizer.state_dict()["param_groups"]}
                    )
                for _ in range(STEPS):
                    self.world.gradient(P)
                    optimizer.step()
                gains.append((self.world.expected_reward() - self.reward) / STEPS)
            return gains

        return progress

    @torch.no_grad()
    def _gain_at(self, weights: Tensor) -> float:
        self.world.weights.copy_(weights)
        return self.world.expected_reward() - self.reward


def at_best_rate(progress: Progress, P: int, seeds: int, rates: Sequence[float]) -> tuple[list[float], float]:
    """The gains of every seed at the rate that is best in the mean over seeds, and that rate."""
    by_seed = [progress(P, seed) for seed in range(seeds)]
    best = max(range(len(rates)), key=lambda i: statistics.fmean(gains[i] for gains in by_seed))
    return [gains[best] for gains in by_seed], rates[best]


def grid(first: float, last: float) -> list[float]:
    rates = [first]
    while rates[-1] < last:
        rates.append(rates[-1] * RATIO)
    return rates


def report(name: str, trained: int, seeds: int) -> list[tuple[str | float, ...]]:
    """Print the table of a checkpoint; a row of the CSV for every seed."""
    checkpoint = Checkpoint(name, trained)
    critical = checkpoint.critical_batch()
    print(
        f"\n{name} after {trained} steps: expected reward {checkpoint.reward:.3f}, "
        f"critical batch {critical:.0f} prompts\n"
    )
    print("| prompts over the critical batch | promised | SGD, one step | rate | AdamW, 20 steps | rate |")
    print("|---|---|---|---|---|---|")
    sgd, adamw = grid(1.0, 1e5), grid(0.003, 5.0)
    cells: dict[float, list[str]] = {share: [] for share in SHARES}
    rows: list[tuple[str | float, ...]] = []
    for what, progress, rates in (
        ("SGD, one step", checkpoint.one_step(sgd), sgd),
        ("AdamW, 20 steps", checkpoint.many_steps(adamw), adamw),
    ):
        found = {share: at_best_rate(progress, max(1, round(share * critical)), seeds, rates) for share in SHARES}
        once = statistics.fmean(found[1.0][0])
        for share, (gains, rate) in found.items():
            over = mean([gain / once for gain in gains])
            cells[share] += [f"{over.value:.2f} +- {over.margin:.2f}", f"{rate:.3g}"]
            rows += [
                (name, trained, what, share, f"{rate:.4g}", seed, f"{gain:.3e}") for seed, gain in enumerate(gains)
            ]
    for share in SHARES:
        print(f"| {share:g} | {2 * share / (1 + share):.2f} | " + " | ".join(cells[share]) + " |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=["sparse", "graded"])
    parser.add_argument("--trained", nargs="+", type=int, default=[0, 100], help="steps of AdamW before the checkpoint")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--csv", type=Path, default=Path("runs/batch_advice.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["world", "trained", "steps", "over_critical", "rate", "seed", "gain_of_a_step"])
        for name in args.worlds:
            for trained in args.trained:
                writer.writerows(report(name, trained, args.seeds))
                file.flush()


if __name__ == "__main__":
    main()
