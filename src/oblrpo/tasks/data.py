"""Problems from the user's own data. Nothing in it is ever formatted, evaluated or executed."""

import gc
import random
import re
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from oblrpo.errors import InputError
from oblrpo.tasks.rows import text_of
from oblrpo.tasks.sources import Stream
from oblrpo.tasks.task import Messages, Problem, check_whole, split_position

PLACEHOLDER = "{prompt}"
# `{name}`, but not the argument of a LaTeX command such as `\boxed{answer}`.
_FIELD = re.compile(r"(?<![A-Za-z])\{[A-Za-z_]\w*\}")
_ROLES = ("system", "user", "assistant")

# More digits than any real answer has; they bound the cost of hostile text.
MAX_DIGITS = 60
# Thousands commas must group by three, so that `3,4` is two numbers.
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
# What stands before a negative number: `-5`, `-$5`, `$-5`, but not the operator in `10-5`.
_MINUS = re.compile(r"(?:^|[^\w)])[-\u2212]\$?$")


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
        """Split if no held-out problems are given."""
        self.name, self.seed, self.default_rewards = name, seed, tuple(default_rewards)
        self.notes: list[str] = []
        is_number = isinstance(heldout_fraction, int | float) and not isinstance(heldout_fraction, bool)
        if not is_number or not 0 <= heldout_fraction < 1:
            raise InputError(f"heldout_fraction must be a number of at least 0 and below 1, got {heldout_fraction!r}.")
        training = problems
        if heldout is None:
            heldout, training = [], []
            for problem in problems:
                (heldout if _position(problem) < heldout_fraction else training).append(problem)
        # In the order of their hashes the first few are a fair sample of all, of a file sorted by difficulty too.
        self._heldout = sorted(heldout, key=_position)
        questions = {problem.key for problem in self._heldout}
        self.training = [problem for problem in training if problem.key not in questions]
        """The problems that are trained on."""
        if dropped := len(training) - len(self.training):
            self.notes.append(f"{dropped} training problems of {name} are held out too; they are not trained on.")

    @property
    def rows(self) -> int:
        """The number of problems that are trained on, of which no batch holds one twice."""
        return len(self.training)

    @property
    def problems(self) -> list[Problem]:
        """All problems."""
        return [*self.training, *self._heldout]

    def drop(self, what: str, unfit: Callable[[Problem], bool]) -> None:
        """Leave out problems, and note how many, and `what` they are."""
        before = len(self.problems)
        self.training = [problem for problem in self.training if not unfit(problem)]
        self._heldout = [problem for problem in self._heldout if not unfit(problem)]
        if dropped := before - len(self.problems):
            self.notes.append(f"{dropped} of {before} problems of {self.name} are {what}; they are left out.")

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the problems of one step, a pure function of seed, step and size."""
        check_whole(f"{self.name}: the batch size", size, 1)
        self._check_enough(len(self.training), size, "training", "prompts_per_step", "lower")
        epoch, batch = divmod(step, len(self.training) // size)
        order = permutation(f"data_file/{self.seed}/{epoch}", len(self.training))
        return [self.training[row] for row in order[batch * size : (batch + 1) * size]]

    def heldout(self, size: int) -> list[Problem]:
        """Return `size` held-out problems; fewer are always the first of more."""
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
    """
    check_template(template)
    problems: list[Problem] = []
    names: dict[str, str] = {}
    collects = gc.isenabled()
    gc.disable()  # it would look through all these new objects again and again, a third of the time
    try:
        for where, row in rows:
            # Names are shared, because every row has come with its own copies of them.
            columns = {names.setdefault(name, name): value for name, value in row.items() if name != prompt_column}
            columns.pop("prompts", None)
            columns.pop("completions", None)
            answer = text_of(row, answer_column, where) if answer_column else ""
            if numbers and last_number(answer) is None:
                raise InputError(
                    f"{where}: column '{answer_column}' holds no number that the reward 'numeric' could compare; mend "
                    "the row or use the reward 'exact'."
                )
            if answer_column and answer_column != "answer":
                columns["answer"] = answer
            prompt = row.get(prompt_column)
            if isinstance(prompt, (list, tuple)) and prompt and all(isinstance(message, dict) for message in prompt):
                messages = _messages(prompt, f"{where}: column '{prompt_column}'")
                problems.append(Problem(messages, answer, columns))
                continue
            question = text_of(row, prompt_column, where)
            # replace, not format: braces in a prompt are only text. A copy of every prompt would take half again.
            text = question if template == PLACEHOLDER else template.replace(PLACEHOLDER, question)
            problems.append(Problem(text, answer, columns, question))
    finally:
        if collects:
            gc.enable()
    return problems


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
    """Check that a prompt template has the place `{prompt}` and no other."""
    if PLACEHOLDER not in template:
        raise InputError(f"prompt_template must contain {{prompt}}, where the prompt goes; got {template!r}.")
    for field in _FIELD.findall(template):
        if field != PLACEHOLDER:
            raise InputError(f"prompt_template may contain {{prompt}} only, but it has {field}; remove that.")


def last_number(text: str) -> Decimal | None:
    """Return the last decimal number in the text; None if there is none or it has over MAX_DIGITS digits.

    Understood: sign, `$` before it, thousands commas, decimals. Not: exponents, fractions, units, LaTeX.
    """
    if len(text) <= MAX_DIGITS and text.isascii() and text.isdigit():  # most answers of most data
        return Decimal(text)
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None or len(last[0]) > MAX_DIGITS:
        return None
    value = Decimal(last[0].replace(",", ""))
    return -value if _MINUS.search(text[max(0, last.start() - 3) : last.start()]) else value


def _position(problem: Problem) -> float:
    return split_position(problem.question or problem.text)


@lru_cache(maxsize=4)
def permutation(key: str, count: int) -> Sequence[int]:
    """Return 0 to count - 1 in an order that the key alone decides."""
    return array("q", random.Random(key).sample(range(count), count))
