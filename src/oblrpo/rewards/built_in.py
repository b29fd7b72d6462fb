"""Built-in rewards, whose options are the fields of their classes; none runs anything of a completion.

`NAME:VALUE` sets the first field, and `NAME:{field: value}` any, in YAML.
"""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from oblrpo.errors import InputError
from oblrpo.rewards.user import WorkerReward
from oblrpo.settings.annotations import Range, check_ranges
from oblrpo.settings.reading import read_yaml
from oblrpo.settings.typed import of_mapping, types_of
from oblrpo.tasks import DataTask
from oblrpo.tasks.data import last_number
from oblrpo.tasks.grading import MathVerifier, last_box
from oblrpo.tasks.rows import plain, value_at

Texts = Sequence[str]
Columns = Mapping[str, Sequence[Any]]


def _text(gold: Any) -> str:
    return plain(gold) or str(gold)


def _texts(value: Any) -> list[str]:
    """Return a text, or those of a list, every run of white space as one space; blank ones are left out."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [text for part in parts if part is not None and (text := " ".join(_text(part).split()))]


def _column(columns: Columns, name: str) -> list[Any]:
    """Return a column, or for `column.key` what its mappings hold there."""
    outer = name if name in columns else name.partition(".")[0]
    if outer not in columns:
        raise InputError(f"a reward reads the column '{name}', which the problems do not have.")
    return [value_at({outer: value}, name) for value in columns[outer]]


def _lacks(row: Mapping[str, Any], column: str, what: str) -> str:
    """Return that a column asks for nothing, where a column is named, or nothing."""
    return "" if not column or _texts(value_at(row, column)) else f"column '{column}' holds no {what} could look for."


@dataclass(frozen=True)
class Exact:
    """1 where the completion is the answer, every run of white space counting as one space."""

    ignore_case: bool = False
    ignore_punctuation: bool = False
    compares = True

    def __call__(self, /, completions: Texts, answer: Sequence[Any], **_: Any) -> list[float]:
        """Return the rewards."""
        pairs = zip(answer, completions, strict=True)
        return [float(self._plain(_text(gold)) == self._plain(text)) for gold, text in pairs]

    def _plain(self, text: str) -> list[str]:
        if self.ignore_punctuation:
            text = "".join(letter for letter in text if unicodedata.category(letter)[0] != "P")
        return (text.casefold() if self.ignore_case else text).split()


@dataclass(frozen=True)
class Numeric:
    """1 where the last numbers of completion and answer are equal.

    Examples:
        >>> Numeric()(["That makes $1234.00."], answer=["#### 1,234"])
        [1.0]
    """

    compares = True

    def __call__(self, /, completions: Texts, answer: Sequence[Any], **_: Any) -> list[float]:
        """Return the rewards."""
        pairs = [(last_number(_text(gold)), last_number(text)) for gold, text in zip(answer, completions, strict=True)]
        return [float(number is not None and number == wanted) for wanted, number in pairs]

    def fault(self, row: Mapping[str, Any], answer: str, column: str) -> str:
        """Return why a row cannot be graded, or nothing."""
        if last_number(answer) is not None:
            return ""
        return (
            f"column '{column}' holds no number that the reward 'numeric' could compare; fix the row, or choose "
            "--rewards contains (the completion contains the answer) or exact (it is the answer); in Python, "
            "reward='contains'."
        )


class Math:
    """1 if the completion's answer equals the gold answer, by `MathVerifier`: worker processes with a time limit."""

    compares = True

    def __init__(self) -> None:
        self.verifier = MathVerifier()
        self.close = self.verifier.close

    def __call__(self, /, completions: Texts, answer: Sequence[Any], **_: Any) -> list[float]:
        """Return the grades; an answer that is a list must be given in full."""
        golds = [gold if isinstance(gold, (list, tuple)) else _text(gold) for gold in answer]
        return [float(verdict.correct) for verdict in self.verifier.grade(golds, completions)]


@dataclass(frozen=True)
class Boxed:
    r"""1 where the text ends in a \boxed{} that is closed and not empty, where the math reward looks first."""

    def __call__(self, /, completions: Texts, **_: Any) -> list[float]:
        """Return the rewards."""
        return [float(bool((last_box(text) or "").strip())) for text in completions]


# A letter or digit of a script that puts spaces between words; Thai to Khmer, Chinese and Japanese do not.
_LETTER = r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"


@lru_cache(4096)
def _standing(words: tuple[str, ...], parts: bool) -> re.Pattern[str]:
    """Return the pattern of any of these texts, the longest first, as whole words unless `parts`; 3.5 is no 5."""
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.compile(
        longest_first if parts else rf"(?<!{_LETTER})(?<!\d[.,])(?:{longest_first})(?!{_LETTER})(?![.,]\d)"
    )


@dataclass(frozen=True)
class Contains:
    """1 where the text, by default the row's answer, stands in the completion as whole words; of a list the share.

    What a row asks for is not paid if another row's stands behind it: the last one counts, as the last number does.
    """

    text: tuple[str, ...] = ()
    """A text, or several, that have to stand in every completion."""
    column: str = ""
    """The column that holds a text, or a list of texts, for each row."""
    any: bool = False
    """Whether one text of a list is enough."""
    others: Literal["before", "none", "any"] = "before"
    """Where what other rows ask for may stand: before what this one asks for, nowhere, or anywhere."""
    ignore_case: bool = False
    parts: bool = False
    """Whether a part of a word counts."""
    task: Any = field(default=None, compare=False)

    @property
    def compares(self) -> bool:
        """Whether it compares with the answer."""
        return not (self.text or self.column)

    def check(self) -> str:
        """Return what is wrong with the options, or nothing."""
        if self.text and not all(map(_texts, self.text)):
            return "the text to look for is blank"
        return "text is for all rows, and column for each: give one of them" if self.text and self.column else ""

    def fault(self, row: Mapping[str, Any], answer: str, column: str) -> str:
        """Return why a row cannot be graded, or nothing."""
        return _lacks(row, self.column, "text that the reward 'contains'")

    def __call__(self, /, completions: Texts, answer: Sequence[Any] = (), **columns: Any) -> list[float]:
        """Return the rewards."""
        wanted: Sequence[Any] = [self.text] * len(completions) if self.text else answer
        wanted = _column({**columns, "answer": answer}, self.column) if self.column else wanted
        return [
            self._pays(self._plain([text]), self._plain(each)) for text, each in zip(completions, wanted, strict=True)
        ]

    def _plain(self, value: Any) -> list[str]:
        return [text.casefold() if self.ignore_case else text for text in _texts(value)]

    def _pays(self, said: list[str], wanted: list[str]) -> float:
        text = "".join(said)
        found = [each for each in wanted if _standing((each,), self.parts).search(text)]
        if not found:
            return 0.0
        pay = 1.0 if self.any else len(found) / len(wanted)
        groups = [] if self.text or self.others == "any" else self._others.items()
        rivals = {each for start, group in groups if start in text for each in group if each in text} - {*wanted}
        if rivals:
            stand = _standing((*found, *sorted(rivals)), self.parts).findall(text)
            pay *= stand[-1] in found if self.others == "before" else rivals.isdisjoint(stand)
        return pay

    @cached_property
    def _others(self) -> dict[str, list[str]]:
        """What all rows ask for, by how it begins, which is quickly looked for; only data have an end."""
        problems = self.task.problems if isinstance(self.task, DataTask) else []
        asked = (value_at(each.columns, self.column) if self.column else each.golds or each.answer for each in problems)
        groups: dict[str, list[str]] = {}
        for text in dict.fromkeys(text for value in asked for text in self._plain(value)):
            groups.setdefault(text[:4], []).append(text)
        return groups


@dataclass(frozen=True)
class Regex:
    """1 where a pattern of Python's `re` is found in the completion; it is matched in a process of its own."""

    pattern: str = ""
    """The pattern for all rows."""
    column: str = ""
    """The column that holds the pattern of each row."""
    whole: bool = False
    """Whether it must match all of the completion."""
    answer: bool = False
    """Whether the first group of the last match must hold the row's answer, white space aside."""
    seconds: float = field(default=60.0, compare=False)

    @property
    def compares(self) -> bool:
        """Whether it compares with the answer."""
        return self.answer

    def check(self) -> str:
        """Return what is wrong with the options, or nothing."""
        if bool(self.pattern) == bool(self.column):
            return "give the pattern of all rows, regex:PATTERN, or the column of each row's, 'regex:{column: NAME}'"
        return self.pattern and _fault_of(self.pattern, self.answer)

    def fault(self, row: Mapping[str, Any], answer: str, column: str) -> str:
        """Return why a row cannot be graded, or nothing."""
        if not self.column:
            return ""
        pattern = value_at(row, self.column)
        fault = _fault_of(pattern, self.answer) if isinstance(pattern, str) and pattern else "is no text"
        return fault and f"column '{self.column}' holds no pattern for the reward 'regex': {fault}."

    @cached_property
    def _matcher(self) -> WorkerReward:
        return WorkerReward("oblrpo.rewards.patterns.matches", self.seconds)

    def close(self) -> None:
        """End the process."""
        if "_matcher" in vars(self):
            self._matcher.close()

    def __call__(self, /, completions: Texts, answer: Sequence[Any] = (), **columns: Any) -> Any:
        """Return the rewards."""
        patterns = (
            _column({**columns, "answer": answer}, self.column) if self.column else [self.pattern] * len(completions)
        )
        golds = [_text(gold) for gold in answer] if self.answer else None
        given = {"patterns": patterns, "golds": golds, "whole": self.whole}
        return self._matcher(prompts=completions, completions=completions, **given)


@lru_cache(4096)
def _fault_of(pattern: str, group: bool) -> str:
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"{pattern[:100]!r} is no regular expression: {error}"
    return (
        f"{pattern[:100]!r} has no group, (...), around what is compared with the answer"
        if group and not groups
        else ""
    )


@dataclass(frozen=True)
class JSONValid:
    """1 where the completion is one JSON object or list, white space aside; with `keys`, an object that has them."""

    keys: tuple[str, ...] = ()
    """Keys that every object must have."""
    column: str = ""
    """The column that holds the keys, a text or a list, for each row."""
    filled: bool = False
    """Whether null, and an empty text, list or object, is no value of a key."""
    fenced: bool = False
    """Whether it may stand in a fence of Markdown, ```json."""

    def check(self) -> str:
        """Return what is wrong with the options, or nothing."""
        if self.keys and self.column:
            return "keys are for all rows, and column for each: give one of them"
        return "filled is for keys: give these, too" if self.filled and not (self.keys or self.column) else ""

    def fault(self, row: Mapping[str, Any], answer: str, column: str) -> str:
        """Return why a row cannot be graded, or nothing."""
        return _lacks(row, self.column, "key that the reward 'json_valid'")

    def __call__(self, /, completions: Texts, **columns: Any) -> list[float]:
        """Return the rewards."""
        keys = map(_texts, _column(columns, self.column)) if self.column else [self.keys] * len(completions)
        return [self._pays(text, each) for text, each in zip(completions, keys, strict=True)]

    def _pays(self, text: str, keys: Sequence[str]) -> float:
        fence = re.fullmatch(r"\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*", text, re.DOTALL) if self.fenced else None
        try:
            value = json.loads(fence[1] if fence else text, parse_constant=int)  # which refuses NaN
        except (ValueError, RecursionError):
            return 0.0
        if not keys:
            return float(isinstance(value, (dict, list)))
        empty: tuple[Any, ...] = (None, "", [], {}) if self.filled else ()
        return float(isinstance(value, dict) and all(key in value and value[key] not in empty for key in keys))


@dataclass(frozen=True)
class Length:
    """How long the completion is; or with `least`, `most` or both 0 where it is as long as they say, and -1 elsewhere.

    With `soft` it falls from 0 to -1 on the last `soft` units before a limit, as TRL's `get_soft_overlong_punishment`
    does (`most` is its max_completion_len, `soft` its soft_punish_cache).
    """

    unit: Literal["words", "characters", "tokens"] = "words"
    """What is counted; tokens as the model wrote them, the end token too."""
    least: Annotated[int | None, Range(0)] = None
    most: Annotated[int | None, Range(0)] = None
    soft: Annotated[int, Range(0)] = 0
    distinct: bool = False
    """Whether a word or token counts once, however often it is said."""

    @property
    def needs_ids(self) -> bool:
        """Whether it must be given the tokens of completions."""
        return self.unit == "tokens"

    def check(self) -> str:
        """Return what is wrong with the options, or nothing."""
        if self.least is not None and self.most is not None and self.least > self.most:
            return f"least, {self.least}, is above most, {self.most}"
        return (
            "soft is for a limit: give least or most" if self.soft and self.least is None and self.most is None else ""
        )

    def __call__(self, /, completions: Texts, **columns: Any) -> list[float]:
        """Return the rewards."""
        if self.needs_ids and "completion_ids" not in columns:
            raise InputError("reward 'length' counts tokens, but those of these completions are not known.")
        units: Sequence[Any] = columns["completion_ids"] if self.needs_ids else completions
        units = [text.split() for text in completions] if self.unit == "words" else units
        return [self._pays(len({*each} if self.distinct else each)) for each in units]

    def _pays(self, size: int) -> float:
        if self.least is None and self.most is None:
            return float(size)
        least, most = self.least or 0, math.inf if self.most is None else self.most
        beyond = max(least - size if least else -math.inf, size - most)
        share = (beyond + self.soft) / self.soft if self.soft else float(beyond > 0)
        return -min(1.0, max(0.0, share)) or 0.0


BUILT_IN: dict[str, Any] = {
    "math": Math,
    "exact": Exact,
    "numeric": Numeric,
    "contains": Contains,
    "regex": Regex,
    "json_valid": JSONValid,
    "length": Length,
    "format": Boxed,
}
"""The classes of rewards by name."""


def is_built_in(name: str) -> bool:
    """Whether a name, with or without options, is that of a built-in reward."""
    return name.partition(":")[0] in BUILT_IN


def built_in(name: str, task: Any = None, seconds: float = 60.0) -> Any:
    """Return the reward of `NAME`, `NAME:VALUE` or `NAME:{field: value}`."""
    head, colon, argument = name.partition(":")
    kind, where = BUILT_IN[head], f"reward '{name}'"
    known = [] if kind is Math else list(types_of(kind))
    if not known and not colon:
        return kind()
    if colon and not (known and argument):
        how = f"{head}:VALUE, or '{head}:{{OPTION: VALUE}}' with {', '.join(known)}" if known else head
        raise InputError(f"{where} {'lacks a value' if known else 'has no options'}; write {how}.")
    options = {known[0]: argument} if colon else {}
    reward = of_mapping(kind, read_yaml(argument, where) if argument[:1] == "{" else options, where)
    try:
        check_ranges(reward)
        if fault := reward.check() if hasattr(reward, "check") else "":
            raise InputError(f"{fault}.")
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    given = {"task": task, "seconds": seconds}
    return replace(reward, **{key: value for key, value in given.items() if hasattr(reward, key)})
