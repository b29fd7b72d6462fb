"""Sums for a pretrained model, with a few solved ones before the question: `12+5=17`, `4+9=13`, `7+16=`."""

import random

from oblrpo.errors import InputError
from oblrpo.tasks.task import GeneratedTask, Problem, check_whole, is_heldout

# The slips of written addition: off by one, or a carry forgotten or taken twice.
SLIPS = (-10, -1, 1, 10)
SIGNS = "+-*"


class ArithmeticTask(GeneratedTask):
    """Solve the last line; the first line of the completion must be its result, in plain digits, and nothing else.

    Further lines do not count, because a base model continues with sums of its own. Questions are held out, whatever
    stands before them: no held-out one is a question in training, nor solved there before another.
    """

    name = "arithmetic"
    about = "Give the result of the last line, which stands below solved ones: `7+16=` asks for `23`."

    def __init__(
        self, seed: int = 0, shots: int = 3, smallest: int = 1, largest: int = 20, operations: str = "+"
    ) -> None:
        """Set the seed, the solved lines (0 to 16), the numbers (0 to 9999, ten or more of them) and signs of `+-*`."""
        super().__init__(seed)
        self.shots = check_whole("Task 'arithmetic': shots", shots, 0, 16)
        self.smallest = check_whole("Task 'arithmetic': smallest", smallest, 0, 9989)
        self.largest = check_whole("Task 'arithmetic': largest", largest, self.smallest + 9, 9999)
        if not isinstance(operations, str) or not operations or set(operations) - set(SIGNS):
            raise InputError(f"Task 'arithmetic': operations must be some of the signs {SIGNS}, got {operations!r}.")
        self.operations = operations

    def draw(self, rng: random.Random) -> Problem:
        """Return one random question under solved ones, which are others than it and each other."""
        question, result = self._question(rng)
        solved: dict[str, int] = {}
        while len(solved) < self.shots:
            other, its = self._question(rng)
            if other != question and not is_heldout(other):
                solved[other] = its
        lines = [f"{other}{its}" for other, its in solved.items()]
        return Problem("\n".join([*lines, question]), str(result))

    def is_heldout(self, problem: Problem) -> bool:
        """Return whether the question, in its last line, belongs to the held-out tenth."""
        return is_heldout(problem.text.rpartition("\n")[2])

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the first line is the result; spaces around it do not matter."""
        return float(completion.partition("\n")[0].strip(" ") == problem.answer)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float) -> str:
        """Return the result, or with probability `noise` one that a slip has made of it."""
        result = int(problem.answer)
        if rng.random() < noise:
            result += rng.choice([slip for slip in SLIPS if result + slip >= 0])
        return str(result)

    def _question(self, rng: random.Random) -> tuple[str, int]:
        """Return `a+b=` and its result; of a difference the larger number comes first."""
        sign = rng.choice(self.operations)
        first, second = rng.randint(self.smallest, self.largest), rng.randint(self.smallest, self.largest)
        if sign == "-":
            first, second = max(first, second), min(first, second)
        results = {"+": first + second, "-": first - second, "*": first * second}
        return f"{first}{sign}{second}=", results[sign]
