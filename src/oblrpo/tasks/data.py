"""Problems from the user's own data. Nothing in it is ever formatted, evaluated or executed."""

import gc
import random
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from oblrpo.errors import InputError
from oblrpo.tasks.rows import text_of
from oblrpo.tasks.sources import Stream
from oblrpo.tasks.task import Messages, Problem, check_whole, split_position
from oblrpo.tasks.verify import last_number

PLACEHOLDER = "{prompt}"
# `{name}`, but not the argument of a LaTeX command such as `\boxed{answer}`.
_FIELD = re.compile(r"(?<![A-Za-z])\{[A-Za-z_]\w*\}")
_ROLES = ("system", "user", "assistant")


class DataTask:
    """Train on some problems and evaluate on others: two lists, or one that is split by a fixed hash of the prompt.

    An epoch is a fresh seeded permutation of the training problems cut into whole batches; those left over
    wait for a later epoch, so that none comes twice in a batch. A training problem that is held out too, in whatever
    spacing or case, is left out of training, and `notes` says so.
    """

    def __init__(
        self,
        name: str,
        problems: Sequence[Problem],
        heldout: Sequence[Problem] | None = None,
        heldout_fraction: float = 0.1,
        seed: int = 0,
        default_rewards: Sequence[str] = ("numeric",),
    ) -> None:
        """Split if no held-out problems are given.

        Raises:
            InputError: a bad fraction.
        """
        self.name, self.seed, self.default_rewards = name, seed, tuple(default_rewards)
        self.notes: list[str] = []
        check_fraction(heldout_fraction)
        training = problems
        if heldout is None:
            heldout, training = [], []
            for problem in problems:
                (heldout if _position(problem) < heldout_fraction else training).append(problem)
        # In the order of their hashes the first few are a fair sample of all, of a file sorted by difficulty too.
        self._heldout = sorted(heldout, key=_position)
        known = {_key(problem) for problem in self._heldout}
        self._train = [problem for problem in training if _key(problem) not in known]
        if dropped := len(training) - len(self._train):
            self.notes.append(f"{dropped} training problems of {name} are held out too; they are not trained on.")

    @property
    def problems(self) -> list[Problem]:
        """All problems."""
        return [*self._train, *self._heldout]

    @property
    def training(self) -> list[Problem]:
        """The problems that are trained on."""
        return self._train

    def drop(self, what: str, unfit: Callable[[Problem], bool]) -> None:
        """Leave out problems, and note how many, and `what` they are."""
        before = len(self._train), len(self._heldout)
        self._train = [problem for problem in self._train if not unfit(problem)]
        self._heldout = [problem for problem in self._heldout if not unfit(problem)]
        if dropped := sum(before) - len(self.problems):
            self.notes.append(f"{dropped} of {sum(before)} problems of {self.name} are {what}; they are left out.")

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the problems of one step, a pure function of seed, step and size.

        Raises:
            InputError: `size` is not positive, or larger than the number of training problems.
        """
        check_whole(f"{self.name}: the batch size", size, 1)
        self._check_enough(len(self._train), size, "training", "prompts_per_step", "lower")
        epoch, batch = divmod(step, len(self._train) // size)
        order = _permutation(f"data_file/{self.seed}/{epoch}", len(self._train))
        return [self._train[row] for row in order[batch * size : (batch + 1) * size]]

    def heldout(self, size: int) -> list[Problem]:
        """Return `size` held-out problems; fewer are always the first of more.

        Raises:
            InputError: `size` is not positive, or larger than the number of held-out problems.
        """
        check_whole(f"{self.name}: the held-out size", size, 1)
        self._check_enough(len(self._heldout), size, "held-out", "eval_prompts", "raise")
        return self._heldout[:size]

    def _check_enough(self, rows: int, size: int, kind: str, setting: str, mend: str) -> None:
        if rows < size:
            why = "".join(f" {note}" for note in self.notes)
            raise InputError(
                f"{self.name} has {rows} {kind} rows, but {size} were asked for; "
                f"set {setting} lower, add rows or {mend} heldout_fraction.{why}"
            )


def problems_of(
    rows: Stream, prompt_column: str, answer_column: str, template: str, numbers: bool = False
) -> list[Problem]:
    """Return a problem of each row; `answer_column` "": rewards need none.

    A prompt is text, put into the template, or messages, used as they are. The other columns are kept for rewards.

    Raises:
        InputError: a bad template, or a bad row; with `numbers` also an answer that holds none.
    """
    check_template(template)
    names: dict[str, str] = {}
    with _uncollected():
        return [
            _problem(where, row, prompt_column, answer_column, template, numbers, names.setdefault)
            for where, row in rows
        ]


def _problem(
    where: str,
    row: dict[str, Any],
    prompt_column: str,
    answer_column: str,
    template: str,
    numbers: bool,
    shared: Callable[[str, str], str],
) -> Problem:
    given = row.get(prompt_column)
    # Shared, because every row has come with its own copies of the names.
    columns = {shared(name, name): value for name, value in row.items() if name != prompt_column}
    columns.pop("prompts", None)
    columns.pop("completions", None)
    answer = text_of(row, answer_column, where) if answer_column else ""
    if numbers and last_number(answer) is None:
        raise InputError(
            f"{where}: column '{answer_column}' holds no number that the reward 'numeric' could compare; mend the row "
            "or use the reward 'exact'."
        )
    if answer_column and answer_column != "answer":
        columns["answer"] = answer
    if isinstance(given, (list, tuple)) and given and all(isinstance(each, dict) for each in given):
        return Problem(_messages(given, f"{where}: column '{prompt_column}'"), answer, columns)
    question = text_of(row, prompt_column, where)
    # replace, not format: braces in a prompt are only text. A copy of every prompt would take half as much again.
    prompt = question if template == PLACEHOLDER else template.replace(PLACEHOLDER, question)
    return Problem(prompt, answer, columns, question)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Make many objects without a collector of garbage that looks through them again and again, a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _messages(given: Sequence[dict[str, Any]], where: str) -> Messages:
    for message in given:
        if (text := str(message.get("content"))) != text.encode("utf-8", "ignore").decode():
            raise InputError(f"{where} holds half a surrogate pair; mend or remove it.")
        if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
            raise InputError(f"{where} must be text or messages with a role ({', '.join(_ROLES)}) and a text, content.")
    if given[-1]["role"] == "assistant":
        raise InputError(f"{where} ends with a message of the assistant; it must end where the completion begins.")
    return [{"role": message["role"], "content": message["content"]} for message in given]


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


def _position(problem: Problem) -> float:
    return split_position(problem.question or problem.text)


def _key(problem: Problem) -> str:
    return " ".join((problem.question or problem.text).casefold().split())


@lru_cache(maxsize=4)
def _permutation(key: str, count: int) -> Sequence[int]:
    return array("q", random.Random(key).sample(range(count), count))
