"""The watch over a run: every condition after every step, while it trains or from what it has left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oblrpo.diagnosis.condition import Condition, Reading
from oblrpo.diagnosis.course import WINDOW, Course, Facts
from oblrpo.diagnosis.of_policy import sampler_apart
from oblrpo.diagnosis.of_rewards import LONG, rewards_missing, same_reward
from oblrpo.diagnosis.of_updates import not_finite
from oblrpo.diagnosis.table import CONDITIONS

APART = (not_finite, rewards_missing, sampler_apart)
"""The conditions that no outage explains."""


def words_of(measured: bool) -> dict[str, Any]:
    """What sentences and cures say beside what was read; of a run whose rate is measured or not."""
    shorten = (
        "lower schedule_kl" if measured else "take a third of learning_rate, or let oblrpo measure it (schedule auto)"
    )
    return {"window": WINDOW, "long": LONG, "shorten": shorten}


@dataclass
class Finding:
    """A condition that held."""

    condition: Condition
    reading: Reading
    """What its statistic showed when it was first found."""
    found: int
    """The step after which it was found."""
    until: int
    """The last step at which it held."""
    sentence: str
    cure: str
    follows: list[Finding] = field(default_factory=list)
    """What is wrong because of it, and needs no cure of its own."""

    @property
    def name(self) -> str:
        """The name of the condition."""
        return self.condition.name

    @property
    def wrong(self) -> bool:
        """Whether something is wrong, or only worth knowing."""
        return self.condition.wrong

    @property
    def since(self) -> int:
        """The first step of the window that showed it."""
        return self.reading.since

    @property
    def sure(self) -> str:
        """How sure it is, in words."""
        many = self.condition.sureness(self.reading)
        return "counted, not estimated" if math.isinf(many) else f"{many:.0f} standard errors from a healthy run"

    @property
    def when(self) -> str:
        """Since when it holds, in words."""
        return f"since step {self.since} (seen after step {self.found}, last after step {self.until})"

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


@dataclass(eq=False)
class Watch:
    """Looks at every condition after every step.

    `observe` takes the steps one after the other; `findings` is what was found so far, worst first.
    """

    facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        self.course = Course(self.facts)
        self.found: dict[str, Finding] = {}
        self.words = words_of(self.facts.measured_rate)

    def observe(self, row: Mapping[str, Any]) -> list[Finding]:
        """Take the next step, and return what is found in it for the first time, and follows from nothing else."""
        before = self.course.step
        self.course.add(row)
        new, step = [], self.course.step
        for condition in CONDITIONS:
            reading, known = condition.statistic(self.course), self.found.get(condition.name)
            if reading is None or not condition.holds(reading):
                if known and condition.anew:
                    del self.found[condition.name]
                continue
            again = known and self._follows(known) and known.until != before and not self.course.outages.explain(step)
            if known and not condition.anew and not again:
                known.until = step
                continue
            words = self.words | {"value": reading.value, "found": step, "until": step} | reading.words
            sentence, cure = condition.sentence.format_map(words), condition.cure.format_map(words)
            finding = Finding(condition, reading, words["found"], words["until"], sentence, cure)
            self.found[condition.name] = finding
            new += [] if self._follows(finding) or (known and condition.anew) else [finding]
        return new

    def _follows(self, finding: Finding) -> bool:
        """Whether it is laid to an outage, which needs no cure of its own."""
        condition = finding.condition
        return not condition.anew and condition not in APART and self.course.outages.explain(finding.found)

    def over(self, rows: Iterable[Mapping[str, Any]]) -> Watch:
        """Take all these steps."""
        for row in rows:
            self.observe(row)
        return self

    @property
    def findings(self) -> list[Finding]:
        """What was found, worst first; what follows from an outage is named in that, and not for itself."""
        found = [self.found[condition.name] for condition in CONDITIONS if condition.name in self.found]
        follow = [each for each in found if self._follows(each)]
        if outage := self.found.get(same_reward.name):
            outage.follows = [each for each in follow if each.wrong]
        return [each for each in found if each not in follow]

    @property
    def unchecked(self) -> dict[str, tuple[str, ...]]:
        """The conditions that could not be looked for, and the metrics that the log lacks for that."""
        lacking = {c.name: tuple(key for key in c.columns if not self._has(key)) for c in CONDITIONS}
        return {name: keys for name, keys in lacking.items() if keys}

    def _has(self, key: str) -> bool:
        before, star, after = key.partition("*")
        if not star:
            return key in self.course.columns
        return any(each.startswith(before) and each.endswith(after) for each in self.course.columns)
