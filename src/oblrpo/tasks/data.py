"""Problems from the user's own data. Nothing in it is ever formatted, evaluated or executed."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, cast

from oblrpo.errors import InputError
from oblrpo.tasks.rows import Lazy, as_text, kind_of, native, text_of, value_at
from oblrpo.tasks.sources import Row, Rows, joined
from oblrpo.tasks.task import NO_ARGS, SAID, Messages, Problem, check_whole, split_position

PLACEHOLDER = "{prompt}"
# `{name}`, but not the argument of a LaTeX command such as `\boxed{answer}`.
_FIELD = re.compile(r"(?<![A-Za-z])\{[A-Za-z_]\w*\}")
_ROLES = ("system", "developer", "user", "assistant", "tool")

# More digits than any real answer has; they bound the cost of hostile text.
MAX_DIGITS = 60
# Thousands commas must group by three, so that `3,4` is two numbers.
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_LAST_DIGIT = re.compile(r"(?s).*[0-9]")
# What stands before a negative number: `-5`, `-$5`, `$-5`, but not the operator in `10-5`.
_MINUS = re.compile(r"(?:^|[^\w)])[-\u2212]\$?$")


class Outline(NamedTuple):
    """What is known of problems without making them, each list in their order."""

    positions: array[float]
    """Places in [0, 1) by which problems are held out (`split_position` of the prompt before any template)."""
    folded: array[int]
    """A hash of that prompt without case and spacing: problems of equal `key` have the same."""
    bytes: array[int]
    """UTF-8 bytes of what the prompt says; 0 of what has to be read in whole, as the first messages of a kind have."""

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Outline:
        """Return what is known already, or else look at each problem."""
        if outline := getattr(problems, "known", None):
            return cast(Outline, outline)
        outline, kinds = cls(array("d"), array("q"), array("q")), set[Any]()
        for problem in problems:
            text = problem.text
            question, size = problem.question or text, len(text.encode())
            folded = question.casefold()
            bare = folded.encode().translate(None, _SPACES) if folded.isascii() else "".join(folded.split()).encode()
            if not isinstance(problem.prompt, str):
                size *= (kind := _kind(problem.prompt)) is not None and kind in kinds
                kinds.add(kind)
            outline.positions.append(split_position(question))
            outline.folded.append(hash(bare))
            outline.bytes.append(size)
        return outline

    def at(self, places: Sequence[int]) -> Outline:
        """Return what is known of the problems at these places."""
        return Outline._make(array(each.typecode, map(each.__getitem__, places)) for each in self)


_SPACES = bytes(code for code in range(128) if chr(code).isspace())


def _kind(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, bool], ...] | None:
    """Return what a template may go by beside the text of messages; None if they have more than roles and text."""
    kind = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if type(content) is not str or len(message) != 2 or (role := message.get("role")) not in _ROLES:
            return None
        kind.append((role, not content or content.isspace()))
    return None if getattr(messages, "template_args", None) else tuple(kind)


class DataTask:
    """Train on some problems and evaluate on others: two lists, or one that is split by a fixed hash of the prompt.

    An epoch is a fresh seeded permutation of the training problems cut into full batches; those left over
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
        about: str = "",
    ) -> None:
        """Split if no held-out problems are given."""
        self.name, self.seed, self.default_rewards, self.about = name, seed, tuple(default_rewards), about
        self._dropped: list[str] = []
        is_number = isinstance(heldout_fraction, int | float) and not isinstance(heldout_fraction, bool)
        if not is_number or not 0 <= heldout_fraction < 1:
            raise InputError(f"heldout_fraction must be a number of at least 0 and below 1, got {heldout_fraction!r}.")
        self._splits, self.given, self.own = heldout is None, problems, heldout or ()
        """The problems of `data`, those among them that are held out included, and of `eval_data`, as they came."""
        self._given, self._own = Outline.of(self.given), Outline.of(self.own)
        self._divide(heldout_fraction)

    def _divide(self, fraction: float) -> None:
        self.fraction = fraction
        given, own = self._given, self._given if self._splits else self._own
        source = self.given if self._splits else self.own
        heldout = [row for row, position in enumerate(own.positions) if position < fraction or not self._splits]
        rest = [row for row, position in enumerate(given.positions) if position >= fraction or not self._splits]
        # In the order of their hashes the first few are a fair sample of all, of a file sorted by difficulty too.
        self._heldout = Lazy(source.__getitem__, array("q", sorted(heldout, key=own.positions.__getitem__)))
        # Prompts are compared only where their hashes agree.
        folded = {own.folded[row] for row in heldout}
        folded &= {given.folded[row] for row in rest}
        keys = {source[row].key for row in heldout if own.folded[row] in folded}
        alone = (row for row in rest if given.folded[row] not in folded or self.given[row].key not in keys)
        self.training = Lazy(self.given.__getitem__, array("q", alone))
        """The problems that are trained on."""

    def hold_out(self, least: int, beside: int) -> None:
        """Change `fraction` where fewer than `least` problems are held out, or more than leave `beside` others."""
        heldout, rows = len(self._heldout), len(self.given)
        if not self._splits or (least <= heldout and beside <= rows - heldout):
            return
        if least + beside > rows:
            lower = [name for name, most in (("prompts_per_step", beside), ("eval_prompts", least)) if most > 2]
            raise InputError(
                f"{self.name} has {rows} rows, too few for {beside} to train on (prompts_per_step) and {least} held "
                f"out (eval_prompts); set {' or '.join(lower)} lower, add rows or give eval_data."
            )
        places = [0.0, *sorted(self._given.positions), 1.0]
        # Equal prompts stay on one side.
        cuts = [cut for cut in range(least, rows - beside + 1) if places[cut] < places[cut + 1]]
        for cut in sorted(cuts, key=lambda cut: abs(cut - heldout))[:1]:
            low, high = places[cut : cut + 2]
            self._divide(next(cut_at for n in range(2, 18) if low < (cut_at := round((low + high) / 2, n)) <= high))

    @property
    def notes(self) -> list[str]:
        """What a user should know of problems that are left out, a sentence each."""
        both = len(self.given) - len(self.training) - self._splits * len(self._heldout)
        twice = f"{both} training problems of {self.name} are held out too; they are not trained on."
        return [twice] * bool(both) + self._dropped

    @property
    def rows(self) -> int:
        """The number of problems that are trained on, of which no batch holds one twice."""
        return len(self.training)

    @property
    def problems(self) -> Sequence[Problem]:
        """All problems."""
        return joined([self.training, self._heldout])

    @property
    def prompts(self) -> tuple[Sequence[Any], Sequence[int]]:
        """The prompts of all rows, those that are held out too included, and their bytes (`Outline.bytes`)."""
        rows = joined([self.given, self.own])
        return Lazy(attrgetter("prompt"), rows), self._given.bytes + self._own.bytes

    def drop(self, what: str, unfit: Collection[int]) -> None:
        """Leave out problems by their places in `prompts`, and note how many, and `what` they are."""
        if not unfit:
            return
        many, rows = len(self.given), len(self.given) + len(self.own)
        self._dropped.append(f"{len(unfit)} of {rows} problems of {self.name} are {what}; they are left out.")
        given = array("q", (row for row in range(many) if row not in unfit))
        own = array("q", (row - many for row in range(many, rows) if row not in unfit))
        self.given, self.own = Lazy(self.given.__getitem__, given), Lazy(self.own.__getitem__, own)
        self._given, self._own = self._given.at(given), self._own.at(own)
        self._divide(self.fraction)

    def train_batch(self, step: int, size: int) -> list[Problem]:
        """Return the problems of one step, a pure function of seed, step and size."""
        check_whole(f"{self.name}: the batch size", size, 1)
        self._check_enough(len(self.training), size, "training", "prompts_per_step", "lower")
        epoch, batch = divmod(step, len(self.training) // size)
        order = permutation(f"data_file/{self.seed}/{epoch}", len(self.training))
        return [self.training[row] for row in order[batch * size : (batch + 1) * size]]

    def heldout(self, size: int, least: int | None = None) -> list[Problem]:
        """Return `size` held-out problems, or all if these are `least` at least; fewer are the first of more."""
        check_whole(f"{self.name}: the held-out size", size, 1)
        self._check_enough(len(self._heldout), least or size, "held-out", "eval_prompts", "raise")
        return list(islice(self._heldout, size))

    def _check_enough(self, rows: int, size: int, kind: str, setting: str, change: str) -> None:
        if rows >= size:
            return
        total, different = len(self.problems), len({*self._given.positions, *self._own.positions})
        more = f" or {change} heldout_fraction" if self._splits else ""
        hint = f"set {setting} lower{',' if more else ' or'} add rows{more}" if size > 2 else f"add rows{more}"
        if self._splits and different <= size <= total and different < total:
            hint = (
                f"its {total} rows hold few different prompts ({different}), and equal prompts stay on one side: give "
                "rows with other prompts as eval_data"
            )
        raise InputError(
            f"{self.name} has {rows} {kind} row{'s' * (rows != 1)}, but {size} are needed; {hint}."
            + "".join(f" {note}" for note in self.notes)
        )


Fault = Callable[[Mapping[str, Any], str, str], str]
"""Of a row's columns, its answer and the name of that one's column: why a reward cannot grade it, or nothing."""


def problems_of(
    rows: Rows,
    prompt_column: str,
    answer_column: str,
    template: str,
    faults: Sequence[Fault] = (),
    compared: bool = True,
) -> Lazy[Problem]:
    """Return a problem of each row, all of which are checked; `answer_column` "": there is no answer.

    A prompt is text, put into the template, or messages, used as they are. The columns but `prompt` are for rewards, by
    their own names; `answer` is the answer where no column is called so. An answer that is `compared` must be text or a
    number; else it may be anything, or absent. A row in which one of `faults` finds one is refused.
    """
    check_template(template)
    hidden = {"prompts", "completions", *({"prompt"} & {prompt_column})}

    def problem(where: str, row: Row) -> Problem:
        columns = {name: value for name, value in row.items() if name not in hidden}
        answer = ""
        if answer_column and compared:
            answer = text_of(row, answer_column, where, "answer_column", prompt_column)
        if answer_column and not compared:
            value = value_at(row, answer_column)
            answer = "" if value is None else as_text(value)
            if answer_column == "answer" or "answer" not in row:
                columns["answer"] = value
        elif answer_column and "answer" not in row:
            columns["answer"] = answer
        for fault in faults:
            if why := fault(columns, answer, answer_column):
                raise InputError(f"{where}: {why}")
        prompt: Any = row.get(prompt_column)
        plain = isinstance(prompt, list) and bool(_kind(prompt))
        prompt = prompt if plain else value_at(row, prompt_column)
        if plain or (isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)):
            return Problem(_messages(prompt, f"{where}: column '{prompt_column}'", row, plain), answer, columns)
        question = text_of(row, prompt_column, where, "prompt_column", answer_column)
        # replace, not format: braces in a prompt are only text. A copy of every prompt would take half again.
        text = question if template == PLACEHOLDER else template.replace(PLACEHOLDER, question)
        return Problem(text, answer, columns, question)

    problems = Lazy(lambda placed: problem(*placed), rows)
    problems.known = Outline.of(problems)
    return problems


def _messages(given: list[dict[str, Any]], where: str, row: Mapping[str, Any], plain: bool) -> Messages:
    """Return checked messages, with the arguments that `row` has for their template; `plain`: they have a `_kind`."""
    messages = given if plain else checked_messages(given, where)
    if messages[-1]["role"] == "assistant":
        raise InputError(f"{where} ends with an assistant message; it must end where the completion begins.")
    args = _template_args(row, where)
    texts = [message if message.keys() - {"role", "content"} else message["content"] for message in messages]
    try:
        "".join(map(as_text, [*texts, args] if args else texts)).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half a surrogate pair; fix or remove it.") from error
    return Messages(messages, where, args)


def checked_messages(given: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return messages without nulls: a table fills up with these what some have and others have not."""
    messages = [
        # That a content is null is said.
        {key: value for key, value in message.items() if key == "content" or value not in (None, [])}
        for message in given
    ]
    for index, message in enumerate(messages):
        if fault := _fault(message):
            raise InputError(
                f"{where} must be text or messages with a role ({', '.join(_ROLES)}) and a text, content; message "
                f"{index} {fault}."
            )
    return messages


def _fault(message: Mapping[str, Any]) -> str:
    """Return what is wrong with a message, or nothing."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        keys = ", ".join(map(repr, message)) or "nothing"
        return f"has the role {as_text(role)!r:.40}" if "role" in message else f"has no role, but {keys}"
    if content is None:
        return "" if message.keys() & SAID else f"({role}) has no content"
    if isinstance(content, list) and content:
        parts = [part for part in content if not isinstance(part, dict) or part.get("type") != "text"]
        return f"({role}) has a part {as_text(parts[0]):.60}, which is not text" if parts else ""
    return "" if isinstance(content, str) else f"({role}) has {kind_of(content)} as its content"


def _template_args(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return what a row has for the chat template, as TRL reads it: `chat_template_kwargs`, and `tools`, both JSON."""
    args: dict[str, Any] = {}
    for column, kind in (("chat_template_kwargs", dict), ("tools", list)):
        value = native(row.get(column))
        if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        elif not isinstance(value, (list, dict)):
            continue  # null, or what only rewards read
        if value and not isinstance(value, kind):
            raise InputError(
                f"{where} is messages, so the chat template also gets column '{column}', which is {kind_of(value)}, "
                f"not {kind_of(kind())}; rename the column if only rewards read it."
            )
        args |= value if isinstance(value, dict) else {column: value}
    return {name: value for name, value in args.items() if value not in (None, [])} if args else NO_ARGS


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
    # The last number ends in the last digit, and begins in the run of digits, commas and points that it ends.
    if (digit := _LAST_DIGIT.match(text)) is None:
        return None
    run = len(text[: digit.end()].rstrip("0123456789,."))
    where = text, run, digit.end()
    last = _NUMBER.fullmatch(*where) or deque(_NUMBER.finditer(*where), maxlen=1).pop()
    if len(last[0]) > MAX_DIGITS:
        return None
    value = Decimal(last[0].replace(",", ""))
    return -value if _MINUS.search(text[max(0, last.start() - 3) : last.start()]) else value


@lru_cache(maxsize=4)
def permutation(key: str, count: int) -> Sequence[int]:
    """Return 0 to count - 1 in an order that the key alone decides."""
    return array("q", random.Random(key).sample(range(count), count))
