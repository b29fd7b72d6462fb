"""Problems from a user's JSON Lines file. Nothing in it is ever formatted, evaluated or executed."""

import random
import re
from functools import lru_cache
from pathlib import Path

from oblrpo.errors import InputError, did_you_mean
from oblrpo.tasks.rows import read_rows
from oblrpo.tasks.task import Problem, check_whole, split_position
from oblrpo.tasks.verify import exact, last_number, numeric

REWARDS = {"exact": exact, "numeric": numeric}
PLACEHOLDER = "{prompt}"
# `{name}`, but not the argument of a LaTeX command such as `\boxed{answer}`.
_FIELD = re.compile(r"(?<![A-Za-z])\{[A-Za-z_]\w*\}")


class DataFileTask:
    """Train and evaluate on the rows of a file, split by a fixed hash of the prompt.

    An epoch is a fresh seeded permutation of the training rows cut into whole batches; rows left over
    wait for a later epoch, so that no row comes twice in a batch.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        reward: str = "exact",
        prompt_template: str = PLACEHOLDER,
        heldout_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Load and check the whole file; `reward` is "exact" (same text) or "numeric" (same last number).

        Raises:
            InputError: an unknown reward, a bad template or fraction, or a bad row (named by its line).
        """
        self.path = Path(path)
        self.name = self.path.stem
        self.seed = seed
        if reward not in REWARDS:
            raise InputError(
                f"Unknown reward '{reward}' for {path}; choose 'exact' or 'numeric'.{did_you_mean(reward, REWARDS)}"
            )
        self._rule = REWARDS[reward]
        check_template(prompt_template)
        check_fraction(heldout_fraction)
        placed = []
        for line, prompt, answer in read_rows(self.path, prompt_column, answer_column):
            if self._rule is numeric and last_number(answer) is None:
                raise InputError(
                    f"{path} line {line}: column '{answer_column}' holds no number that the reward "
                    f"'numeric' could compare; mend the row or use the reward 'exact'."
                )
            # replace, not format: braces in a prompt are only text.
            problem = Problem(prompt_template.replace(PLACEHOLDER, prompt), answer)
            placed.append((split_position(prompt), problem))
        self.problems = [problem for _, problem in placed]
        self._train = [problem for place, problem in placed if place >= heldout_fraction]
        held = [row for row in placed if row[0] < heldout_fraction]
        # In the order of their hashes the first few held-out rows are a fair sample of all.
        self._heldout = [problem for _, problem in sorted(held, key=lambda row: row[0])]

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the rows of one step, a pure function of seed, step and size.

        InputError if `size` is not positive, or larger than the number of training rows.
        """
        check_whole(f"{self.path}: the batch size", size, 1)
        self._check_enough(len(self._train), size, "training", "prompts_per_step", "lower")
        epoch, batch = divmod(step, len(self._train) // size)
        order = _permutation(f"data_file/{self.seed}/{epoch}", len(self._train))
        return [self._train[row] for row in order[batch * size : (batch + 1) * size]]

    def heldout(self, size: int) -> list[Problem]:
        """Return `size` held-out rows; fewer are always the first of more.

        InputError if `size` is not positive, or larger than the number of held-out rows.
        """
        check_whole(f"{self.path}: the held-out size", size, 1)
        self._check_enough(len(self._heldout), size, "held-out", "eval_prompts", "raise")
        return self._heldout[:size]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the chosen rule accepts the completion, otherwise 0.0; never raises."""
        return self._rule(problem.answer, completion)

    def _check_enough(self, rows: int, size: int, kind: str, setting: str, mend: str) -> None:
        if rows < size:
            raise InputError(
                f"{self.path} has {rows} {kind} rows, but {size} were asked for; "
                f"set {setting} lower, add rows or {mend} heldout_fraction."
            )


def check_template(template: str) -> None:
    """Check that a prompt template has the place `{prompt}` and no other.

    Raises:
        InputError: it does not.
    """
    if PLACEHOLDER not in template:
        raise InputError(f"prompt_template must contain {{prompt}}, where the prompt goes; got {template!r}.")
    for field in _FIELD.findall(template):
        if field != PLACEHOLDER:
            raise InputError(f"prompt_template may contain {{prompt}} only, but it has {field}; remove that.")


def check_fraction(value: object) -> None:
    """Check a held-out fraction.

    Raises:
        InputError: it is not a number of at least 0 and below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"heldout_fraction must be a number of at least 0 and below 1, got {value!r}.")


@lru_cache(maxsize=4)
def _permutation(key: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(key).sample(range(count), count))
