"""The watch over a run: every condition after every step, while it trains or from what it has left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oblrpo.diagnosis.condition import Condition, Reading
from oblrpo.diagnosis.course import Course, Facts
from oblrpo.diagnosis.outages import WAKE
from oblrpo.diagnosis.table import CONDITIONS

EACH_ROW = [condition for condition in CONDITIONS if condition.rows]
LONGER = "length runs away"
STALLS = {"all truncated", "one answer", "silent groups", "rewards agree", "format saturated", "no progress", LONGER}
"""What is dropped when the reward has risen since (length: since it began to grow): slow runs begin like that."""
PASSING = ("outlying reward", "not finite")
"""The conditions that explain what is found while they hold and soon after, and nothing later."""
PAID = ("reward without accuracy", "one answer pays", "task traded", "format saturated")
"""The conditions in which completions come to earn the most: they explain no outage in which they earn less."""
TENSES = [dict(zip(("has", "is", "does", "runs", "shrinks", "grows"), words.split(), strict=True))
          for words in ("has is does runs shrinks grows", "had was did ran shrank grew")]  # fmt: skip
"""Verbs of the sentences of conditions that may be made up for: as long as they hold, and after that."""
EARLY = 3  # windows by which what comes with a cause may show before it: a gradient grows before a reward falls


def words_of(measured: bool) -> dict[str, Any]:
    """What cures say beside what was read; of a run whose rate is measured or not."""
    shorten = (
        "lower schedule_kl" if measured else "use a third of learning_rate, or let oblrpo measure it (schedule auto)"
    )
    return {"shorten": shorten, "enough": "100 steps"}


@dataclass(eq=False)
class Finding:
    """A condition that held."""

    condition: Condition
    reading: Reading  # what its statistic showed when it was first found
    found: int  # the step after which it was found
    until: int  # the last step at which it held
    sentence: str
    cure: str
    past: str = ""  # the sentence once it is made up for
    unit: str = "step"  # what `since`, `found` and `until` count: "row" where a log names no steps
    follows: list[Finding] = field(default_factory=list)  # what follows from it, and needs no fix of its own
    over: bool = False  # whether it is made up for

    @property
    def name(self) -> str:
        """The name of the condition."""
        return self.condition.name

    @property
    def wrong(self) -> bool:
        """Whether something is wrong; else it is a note."""
        return self.condition.wrong and not self.over

    @property
    def since(self) -> int:
        """The first step of the window that showed it."""
        return self.reading.since

    def comes_back(self, other: Finding) -> bool:
        """Whether it compares with what another, which was made up for, has found: it is the way back."""
        same = self.condition.columns[:1] == other.condition.columns[:1]
        return same and other.since <= self.reading.words.get("step", -1) <= other.until

    @property
    def sure(self) -> str:
        """How sure it is, in words."""
        many = self.condition.sureness(self.reading)
        return f"not chance ({'counted' if math.isinf(many) else f'{many:.0f} standard errors'})"

    @property
    def when(self) -> str:
        """Since when it holds, in words."""
        if self.since == self.until:
            return f"in {self.unit} {self.since}"
        last = f", last seen after {self.unit} {self.until}" if self.until > self.found else ""
        return f"since {self.unit} {self.since}; first reported after {self.unit} {self.found}{last}"

    def plain(self) -> dict[str, Any]:
        """It as a JSON object; `standard_errors` is None where it was counted and not estimated."""
        many = self.condition.sureness(self.reading)
        return {
            "name": self.name, "since": self.since, "found": self.found, "until": self.until,
            "standard_errors": None if math.isinf(many) else many, "sentence": self.sentence, "cure": self.cure,
            "follows": [{key: each for key, each in f.plain().items() if key != "cure"} for f in self.follows],
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.sentence} {self.cure}"


class Watch:
    """Looks at every condition after every step.

    `observe` takes the steps one after the other; `findings` is what was found so far, worst first.
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self.course, self.found = Course(self.facts), dict[str, Finding]()
        self.words = words_of(self.facts.measured_rate) | self.course.words

    def observe(self, row: Mapping[str, Any]) -> list[Finding]:
        """Take the next step, and return what is found in it for the first time, and follows from nothing else."""
        before, compared = self.course.step, self.course.compared
        self.course.add(row)
        new, step = [], self.course.step
        for condition in CONDITIONS if self.course.compared == step else EACH_ROW:
            reading, known = condition.statistic(self.course), self.found.get(condition.name)
            if reading is None or not condition.holds(reading):
                if known and condition.updated:
                    del self.found[condition.name]
                elif known and condition.mends and not known.over and self._mended(known):
                    known.over, known.sentence, known.cure = True, f"{known.past} It has recovered since.", ""
                continue
            if known and known.reading is reading:
                continue
            told, seen = known and not condition.updated and not known.over, before if condition.rows else compared
            # It is told anew after a gap if what explained it then, and passes, does so no more.
            again = known and known.until != seen and self._passing(known) and not self._passing(known, step)
            words = self.words | {"value": reading.value, "found": step, "until": step} | reading.words
            sentence, past = (condition.sentence.format_map(tense | words) for tense in TENSES)
            cure, span = condition.cure.format_map(words), (words["found"], words["until"])
            if known and told and not again:
                if known.until == seen:  # it has held since: its figures are those of now
                    known.sentence, known.cure = sentence, cure
                known.until = step
                continue
            finding = Finding(condition, reading, *span, sentence, cure, past, self.facts.unit)
            self.found[condition.name] = finding
            new += [] if known and condition.updated else [finding]
        return [each for each in self.findings if each in new] if new else []

    def _mended(self, known: Finding) -> bool:
        """Whether a metric has come back over half of the way that it went."""
        words = known.reading.words
        late = self.course.now(words.get("key", known.condition.columns[0]), self.course.long)
        return late is not None and abs(late.value - words["then"]) <= abs(late.value - words["now"])

    def _passing(self, found: Finding, step: int = 0) -> bool:
        """Whether something that passes, such as an outage, explains what is found, in that step or when it was."""
        passing = (self.found[name] for name in ("same reward", *PASSING) if name in self.found)
        return any(self._explains(each, found, step) for each in passing)

    def _explains(self, cause: Finding, found: Finding, step: int = 0) -> bool:
        """Whether a cause brings along what is found, in that step or when it was: by the table, and by its time."""
        step = step or (found.found if found.condition.wrong else found.until)  # a note holds as long as it is said
        if found.name not in cause.condition.brings:
            return False
        if cause.name == "same reward":
            return self.course.outages.explain(step)
        if found.name == "same reward" and cause.name in PAID and not self.course.outages.paid:
            return False
        in_time = cause.found <= step <= cause.until + self.course.rows(WAKE, 6) * self.facts.every
        if cause.name in PASSING:
            return in_time
        if CONDITIONS.index(cause.condition) > CONDITIONS.index(found.condition):  # then it is to be found long before
            return in_time and not self._explains(found, cause)
        early = EARLY * self.course.window * self.facts.every
        return bool(cause.condition.turns & found.condition.turns) or step >= cause.since - early

    def over(self, rows: Iterable[Mapping[str, Any]]) -> Watch:
        """Take all these steps."""
        for row in rows:
            self.observe(row)
        return self

    @property
    def findings(self) -> list[Finding]:
        """What was found, worst first, causes alone: each has what comes with it, which needs no cure of its own.

        That is what it explains, and what one would cure by turning back what it turns.
        """
        found = [self.found[condition.name] for condition in CONDITIONS if condition.name in self.found]
        since = {each.name: each.reading.words.get("step" * (each.name == LONGER), each.until) for each in found}
        left = [each for each in found if each.name not in STALLS or not self.course.risen_since(since[each.name])]
        past, left = [each for each in left if each.over], [each for each in left if not each.over]
        left = [each for each in left if not any(each.comes_back(other) for other in past)]
        causes: list[Finding] = []
        for each in found:
            each.follows = []
        while left:
            chain = left[:1]
            while up := next((each for each in left if each not in chain and self._explains(each, chain[-1])), None):
                chain.append(up)
            part = [each for each in left if each is chain[-1] or self._explains(chain[-1], each)]
            left = [each for each in left if each not in part]
            cause = next((each for each in causes if each.condition.opposes(chain[-1].condition)), chain[-1])
            causes += [cause] if cause is chain[-1] else []
            cause.follows += [each for each in part if each is not cause and each.wrong]
        return causes + [each for each in past if not any(self._explains(cause, each) for cause in causes)]

    @property
    def unchecked(self) -> dict[str, tuple[str, ...]]:
        """The conditions that could not be checked, and the metrics that the log lacks for that."""
        lacking = {c.name: tuple(key for key in c.columns if not self._has(key)) for c in CONDITIONS}
        return {name: keys for name, keys in lacking.items() if keys and name not in self.found}

    def _has(self, key: str) -> bool:
        before, star, after = key.partition("*")
        if not star:
            return key in self.course.columns
        return any(each.startswith(before) and each.endswith(after) for each in self.course.columns)
