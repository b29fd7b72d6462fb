"""Rewards of a step, drawn one by one: uneven as honest ones are, and with outliers that are not.

    python -m lab.alarms.uneven

prints how far the farthest reward of 100 steps lies from its step's mean, as a multiple of the widest middle half of
these steps and of what rewards of a prompt usually spread: the median of eight runs, and the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Row = dict[str, Any]
Size = tuple[int, int]
"""Prompts, and completions of each."""
Draw = Callable[[Generator, Size], NDArray[np.float64]]


def of_rewards(rewards_PG: NDArray[np.float64]) -> Row:
    """What our runs log of a step's rewards."""
    std_P, (quarter, three) = rewards_PG.std(1, ddof=1), np.quantile(rewards_PG, (0.25, 0.75))
    stderr = rewards_PG.mean(1).std(ddof=1) / math.sqrt(len(rewards_PG))
    return {
        "reward": float(rewards_PG.mean()), "reward_std": float(std_P.mean()), "reward_iqr": float(three - quarter),
        "frac_reward_zero_std": float((std_P == 0).mean()), "reward_min": float(rewards_PG.min()),
        "reward_max": float(rewards_PG.max()), "reward_stderr": float(stderr),
    }  # fmt: skip


SCORES: dict[str, Draw] = {
    "normal": lambda random, n: random.normal(0, 1, n),
    "exponential": lambda random, n: random.exponential(1, n),
    "exponential, squared": lambda random, n: random.exponential(1, n) ** 2,
    "log-normal, deviation 1": lambda random, n: np.exp(random.normal(0, 1, n)),
    "Student's t, 4 degrees": lambda random, n: random.standard_t(4, n),
}
"""Honest rewards without a bound."""


def honest(random: Generator, n: Size) -> Callable[[float], Row]:
    """A kind of reward, drawn at random: what a step shows of it, by the share of what can be learned that is learned.

    Half are successes of 1 % or so at first that pay 1, 5 or 10, alone or beside a little shaping. The others are
    percentages that come near 100, and `SCORES` of any size.
    """
    pays, shaping = random.choice([1, 5, 10]), random.choice([0, 1e-3, 0.1])
    rare, scale = random.uniform(0.003, 0.02), 10 ** random.uniform(-2, 3)
    kind, of_scores = int(random.integers(12)), list(SCORES.values())

    def rewards_PG(learned: float) -> Any:
        if kind < len(of_scores):
            return scale * (learned + (1 + learned) * of_scores[kind](random, n))
        if kind == len(of_scores):
            return 100 * random.beta(0.5 + 40 * learned, 0.5, n)
        return pays * random.binomial(1, rare + learned**4 / 2, n) + random.normal(0, shaping, n)

    return lambda learned: of_rewards(rewards_PG(learned))


def noisy(noise: Draw) -> Callable[[Any, Row, int], Row]:
    """Rewards between 0 and 1 of the level that a run is at, with such noise, on the scale of the run."""

    def change(world: Any, row: Row, since: int) -> Row:
        n, level = (world.P, world.G), world.level(row["step"])
        rewards_PG = world.random.beta(4 * level, 4 * (1 - level), n) + noise(world.random, n)
        return row | of_rewards(world.shift + world.scale * rewards_PG)

    return change


def one_in_128(random: Generator, n: Size) -> NDArray[np.float64]:
    """One completion in 128 earns 100 more, or less."""
    return random.choice([-100, 100], n) * (random.random(n) < 1 / 128)


def heavy(random: Generator, n: Size) -> NDArray[np.float64]:
    """.3 times Student's t of 1.5 degrees of freedom."""
    return 0.3 * random.standard_t(1.5, n)


def thousand(world: Any, row: Row, since: int) -> Row:
    """One completion of a step earns 1,000, as its mean, spread and ends show it."""
    if since > 1:
        return row
    mean, std = row["reward"] + 1e3 / world.P / world.G, row["reward_std"] + 1e3 / world.P / math.sqrt(world.G)
    return row | {"reward": mean, "reward_std": std, "reward_max": 1e3, "reward_iqr": row["reward_std"]}


def main() -> None:
    """Print both multiples, for batches of several sizes."""
    for n in ((16, 4), (32, 4), (128, 8)):
        for name, draw in (SCORES | {"one in 128 is +-100": one_in_128, "+ .3 t(1.5)": heavy}).items():
            alone = name in SCORES
            multiples = []
            for seed in range(8):
                random = np.random.default_rng(seed)
                steps = [of_rewards(draw(random, n) + (0.0 if alone else random.beta(2, 3, n))) for _ in range(100)]
                far = max(max(row["reward_max"] - row["reward"], row["reward"] - row["reward_min"]) for row in steps)
                middle, spread = (
                    max(row["reward_iqr"] for row in steps),
                    np.median([row["reward_std"] for row in steps]),
                )
                multiples.append((far / middle, far / spread))
            (by_middle, by_spread), most = np.median(multiples, 0), np.max(multiples, 0)
            print(f"{n[0]:3} x {n[1]}  {name:24} middle half {by_middle:5.0f} ({most[0]:.0f})"
                  f"   spread {by_spread:5.0f} ({most[1]:.0f})")  # fmt: skip


if __name__ == "__main__":
    main()
