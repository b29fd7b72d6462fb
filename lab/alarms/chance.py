"""How often chance looks like a reward that fell, in logs of any length whose rows hang together.

    python -m lab.alarms.chance [--runs 40] [--most 10000]

Lengths are drawn between 30 rows and the most, evenly in their logarithm. Of each kind it prints how many runs had the
alarm at any time, and how many have it at the end, when it is not made up for.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from oblrpo.diagnosis import Watch

Random = np.random.Generator
FIRST = 40_000  # of the seeds: none of these had a part in the choice of a rule


def together(random: Random, count: int, rho: float) -> np.ndarray:
    """Values of deviation 1, each rho times the one before and noise."""
    values = random.normal(0, 1, count)
    for step in range(1, count):
        values[step] = rho * values[step - 1] + math.sqrt(1 - rho * rho) * values[step]
    return values


def rising(random: Random, count: int) -> np.ndarray:
    """A logistic curve from 0.2 to 0.8."""
    middle, pace = random.uniform(0.05, 0.8) * count, random.uniform(0.02, 0.3) * count
    return 0.2 + 0.6 / (1 + np.exp((middle - np.arange(count)) / pace))


KINDS: dict[str, Callable[[Random, int], np.ndarray]] = {
    "0.5 +- 0.2, white": lambda random, n: 0.5 + 0.2 * random.normal(0, 1, n),
    "0.5 +- 0.2, rho 0.5": lambda random, n: 0.5 + 0.2 * together(random, n, 0.5),
    "0.5 +- 0.2, rho 0.9": lambda random, n: 0.5 + 0.2 * together(random, n, 0.9),
    "0.5 +- 0.2, rho 0.97": lambda random, n: 0.5 + 0.2 * together(random, n, 0.97),
    "0.06, rho 0.97, and 0.1 white": lambda random, n: (
        0.5 + 0.06 * together(random, n, 0.97) + 0.1 * random.normal(0, 1, n)
    ),
    "2 prompts x 4": lambda random, n: random.binomial(4, random.beta(0.5, 0.7, (n, 2))).mean(1) / 4,
    "64 completions of 0.01": lambda random, n: random.binomial(64, 0.01, n) / 64,
    "rises +- 0.08, white": lambda random, n: rising(random, n) + 0.08 * random.normal(0, 1, n),
    "rises +- 0.08, rho 0.9": lambda random, n: rising(random, n) + 0.08 * together(random, n, 0.9),
}


def main() -> None:
    """Print a line of each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--most", type=int, default=10_000)
    arguments = parser.parse_args()
    for kind, draw in KINDS.items():
        found = ended = 0
        for seed in range(FIRST, FIRST + arguments.runs):
            random = np.random.default_rng(seed)
            count = round(math.exp(random.uniform(math.log(30), math.log(arguments.most))))
            watch = Watch().over({"reward": float(reward)} for reward in draw(random, count))
            found += "reward fell" in watch.found
            ended += any(each.wrong and each.name == "reward fell" for each in watch.findings)
        print(f"{kind:32} of {arguments.runs} runs {found} at any time, {ended} at the end", flush=True)


if __name__ == "__main__":
    main()
