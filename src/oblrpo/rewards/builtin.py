"""Rewards by name, in the signature of the user's own: f(prompts, completions, **columns) -> list of numbers."""

from collections.abc import Callable, Sequence
from typing import Any

from oblrpo.tasks.data import last_number
from oblrpo.tasks.grading import MathVerifier, last_box
from oblrpo.tasks.rows import plain

Texts = Sequence[str]


def exact(prompts: Texts, completions: Texts, answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 where the completion is the answer, every run of white space counting as one space."""
    return [float(_text(gold).split() == text.split()) for gold, text in zip(answer, completions, strict=True)]


def numeric(prompts: Texts, completions: Texts, answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 where the last numbers of completion and answer are equal.

    Examples:
        >>> numeric(["What do 17 of them cost?"], ["That makes $1234.00."], answer=["#### 1,234"])
        [1.0]
    """
    wanted = [last_number(_text(gold)) for gold in answer]
    return [
        float(number is not None and number == last_number(text))
        for number, text in zip(wanted, completions, strict=True)
    ]


def boxed(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    r"""Return 1 where the text ends in a \boxed{} that is closed and not empty, where the math reward looks first."""
    return [float(bool((last_box(text) or "").strip())) for text in completions]


def words(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
    """Return the number of words of each completion; a negative weight makes them cost something."""
    return [float(len(text.split())) for text in completions]


class Math:
    """1 if the completion's answer equals the gold answer, by `MathVerifier`: worker processes with a time limit."""

    def __init__(self) -> None:
        self.verifier = MathVerifier()
        self.close = self.verifier.close

    def __call__(self, /, prompts: Texts, completions: Texts, answer: Sequence[Any], **columns: Any) -> list[float]:
        """Return the grades; an answer that is a list must be given in full."""
        golds = [gold if isinstance(gold, (list, tuple)) else _text(gold) for gold in answer]
        return [float(verdict.correct) for verdict in self.verifier.grade(golds, completions)]


def _text(gold: Any) -> str:
    return plain(gold) or str(gold)


BUILT_IN: dict[str, Callable[[], Callable[..., Sequence[float]]]] = {
    "math": Math,
    "exact": lambda: exact,
    "numeric": lambda: numeric,
    "format": lambda: boxed,
    "length": lambda: words,
}
"""What makes each reward, by its name."""

NEED_ANSWER = {"math", "exact", "numeric"}  # names of the rewards that compare with the column `answer`
