"""Addition of several numbers with the running sums written out: `47+8+55=` -> `55,110`."""

import random

from oblrpo.tasks.generated import GeneratedTask
from oblrpo.tasks.task import Problem, check_whole

# The slips of written addition: off by one, or a carry forgotten or taken twice.
SLIPS = (-10, -1, 1, 10)
# Share of demonstrations that give the answer alone: quicker, but harder for a small policy to get right.
TERSE = 0.2


class AdditionTask(GeneratedTask):
    """Add `min_terms` to `max_terms` numbers of 1 to `largest`; only the last number written counts."""

    name = "addition"

    def __init__(self, seed: int = 0, min_terms: int = 2, max_terms: int = 5, largest: int = 99) -> None:
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
        """Return 1.0 if what follows the last comma is the total, in plain digits."""
        return float(completion.rpartition(",")[2].strip() == problem.answer)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return the running sums, or now and then the total alone; a slip is carried into later sums."""
        first, *rest = map(int, problem.prompt.rstrip("=").split("+"))
        sums = running_sums(first, rest, rng, noise)
        return str(sums[-1]) if rng.random() < TERSE else ",".join(map(str, sums))


def running_sums(first: int, rest: list[int], rng: random.Random, noise: float) -> list[int]:
    """Return first + rest[0], that + rest[1], ..., each wrong with probability `noise`."""
    sums, total = [], first
    for term in rest:
        total += term
        if rng.random() < noise:
            total += rng.choice([slip for slip in SLIPS if total + slip >= 0])
        sums.append(total)
    return sums
