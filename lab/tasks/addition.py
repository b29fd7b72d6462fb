"""Sums step by step, for small policies: `8+4+9=` -> `12+9=21`."""

import random

from oblrpo.tasks import GeneratedTask, Problem
from oblrpo.tasks.arithmetic import SLIPS
from oblrpo.tasks.task import check_whole

# Share of demonstrations that give the answer alone: quicker, but harder for a small policy to get right.
TERSE = 0.2


class AdditionTask(GeneratedTask):
    """Add `min_terms` to `max_terms` numbers of 1 to `largest`; only the last number written counts."""

    name = "addition"

    def __init__(self, seed: int = 0, min_terms: int = 3, max_terms: int = 5, largest: int = 9) -> None:
        """Set the seed and the size of the sums: 2 <= min_terms <= max_terms <= 9 and 9 <= largest <= 9999."""
        super().__init__(seed)
        self.min_terms = check_whole("Task 'addition': min_terms", min_terms, 2, 9)
        self.max_terms = check_whole("Task 'addition': max_terms", max_terms, min_terms, 9)
        self.largest = check_whole("Task 'addition': largest", largest, 9, 9999)

    def draw(self, rng: random.Random) -> Problem:
        """Return one random sum; its answer is the total."""
        count = rng.randint(self.min_terms, self.max_terms)
        terms = [rng.randint(1, self.largest) for _ in range(count)]
        return Problem("+".join(map(str, terms)) + "=", str(sum(terms)))

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if what follows the last equals sign is the total, in plain digits."""
        return float(completion.rpartition("=")[2].strip() == problem.answer)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return the steps, or now and then the total alone; a slip is carried into the later steps."""
        written = steps(list(map(int, problem.text.rstrip("=").split("+"))), rng, noise)
        return written[-1] if rng.random() < TERSE else "=".join(written)


def steps(terms: list[int], rng: random.Random, noise: float) -> list[str]:
    """Return the sum with its first two numbers added, again and again, each time wrong with probability `noise`."""
    written = []
    while len(terms) > 1:
        total = terms[0] + terms[1]
        if rng.random() < noise:
            total += rng.choice([slip for slip in SLIPS if total + slip >= 0])
        terms = [total, *terms[2:]]
        written.append("+".join(map(str, terms)))
    return written
