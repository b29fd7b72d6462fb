"""Outages: stretches of steps whose completions all earned the same, so that there was nothing to learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oblrpo.diagnosis.course import Column

Numbers = Mapping[str, float]  # the metrics of a step that are finite numbers

CHANCE = 1e-5  # that there is no outage: 5 steps, where agreement follows on at most one in ten that differ
PLAIN = 20  # steps, where a log shows nothing but the mean
ROWS, ROWS_PLAIN, ROWS_WAKE = 2, 5, 6  # as many rows at least, where a row is the mean of several steps
WAKE = 20  # steps after an outage whose alarms are laid to it: ten, and those whose window begins in these
ROUNDING = 1e-6  # of a reward
NEAR = 0.1  # the share of a range in which two rewards are near one another
FEW = 3  # steps whose mean is near, or not
SOLVED_ACCURACY = 0.9  # the held-out accuracy of a solved task
SHOWN = 3  # ranges of steps that a sentence names

OF_POLICY = ("step", "entropy", "kl", "completions/", "clip_ratio/", "sampling/", "skipped", "frac_prompts_masked")
"""What a step says of the policy, whatever was earned; the rest of its metrics come of rewards."""


def left_out(row: Numbers) -> bool:
    """Whether our trainer made no update because no reward differed from another, and all of it was finite."""
    return row.get("skipped") == 1 and row.get("lr_factor") == row.get("grad_norm") == 0


def alike(row: Numbers) -> bool | None:
    """Whether all completions of a step, of a prompt at least, earned the same; None: its metrics do not say."""
    if left_out(row):
        return True
    small = ROUNDING * abs(row["reward"])
    if "reward_min" in row and "reward_max" in row:
        return row["reward_max"] - row["reward_min"] <= small
    spreads = [row[key] for key in ("reward_stderr", "reward_std") if key in row]
    share = row.get("frac_reward_zero_std")
    if max(spreads, default=0.0) > small or (share is not None and share < 1 - ROUNDING):
        return False
    parts = [value for key, value in row.items() if key.startswith("rewards/") and key.endswith("/std")]
    parts = parts if len(parts) == 1 else []  # of several one may count for nothing in the sum
    return max(parts, default=0.0) <= small if spreads or parts or share is not None else None


@dataclass
class Stretch:
    """Steps in a row whose completions all earned the same."""

    earned: float
    first: int
    needed: int  # as many steps are no chance
    rise: float  # how far what is earned lies above the lowest reward before; infinite where there was none
    plain: int  # as many are none where the log shows nothing but their mean
    solved: bool  # whether the task is solved, so that nothing is wrong: rewards came to their highest step by step
    last: int = 0
    steps: int = 0
    shown: int = 0  # those of its steps of which the log shows that completions earned the same
    found: int = 0  # the step after which it was reported
    over: int = -1  # the last step in which it still shows, once it is reported

    def __post_init__(self) -> None:
        self.risen = self.solved

    @property
    def long(self) -> bool:
        """Whether it is no chance."""
        return self.shown >= self.needed or self.steps >= max(self.plain, self.needed)

    @property
    def figure(self) -> str:
        """What was earned, in words."""
        return f"{self.earned + 0.0:.4g}"  # no -0

    def __str__(self) -> str:
        return f"every completion of the last {self.steps} steps got reward {self.figure}: check the reward"

    def evaluated(self, accuracy: float, margin: float, lowest: float) -> None:
        """Decide by held-out accuracy whether the task is solved; `lowest` is that of all evaluations before.

        Where rewards jumped, an accuracy that is exactly what they are may come of the same fault.
        """
        copied = self.rise < math.inf and not margin and math.isclose(accuracy, self.earned, rel_tol=ROUNDING)
        if self.risen:
            self.solved = accuracy + margin >= min(SOLVED_ACCURACY, lowest + self.rise / 4)
        elif self.rise and self.earned >= SOLVED_ACCURACY and not copied:
            self.solved = accuracy + margin >= SOLVED_ACCURACY


def rise_to(earned: float, columns: Mapping[str, Column]) -> tuple[float, bool]:
    """How far a reward lies above the lowest so far, 0 if it is not the highest; and whether it was reached by steps.

    The rewards of a task that is being solved come near it, or keep their pace, and differ less and less.
    """
    rewards, spreads, best = (columns.get(key) for key in ("reward", "reward_std", "reward_max"))
    if not rewards or not rewards.count:
        return math.inf, False
    rise, most = earned - rewards.lowest, max(rewards.highest, best.highest if best else -math.inf)
    if rise <= 0 or earned < most - ROUNDING * abs(most):
        return 0.0, False
    values = [value for _, value, _ in rewards.last][-FEW:]
    scale = earned if rewards.lowest >= 0 and earned <= 1 else rise / 2
    near = earned - math.fsum(values) / len(values) <= NEAR * scale
    paced = earned - values[-1] <= (values[-1] - values[0]) / FEW
    return rise, (near or paced) and (not spreads or not spreads.count or spreads.last[-1][1] <= spreads.highest / 2)


class Outages:
    """The outages of a run so far."""

    def __init__(self, every: int = 1, unit: str = "step") -> None:
        self.every, self.unit = every, unit  # steps a row, or "row" where a log names none
        self.now: Stretch | None = None  # whose completions earn the same up to the newest step
        self.reported: list[Stretch] = []  # those that are outages
        self.solved: Stretch | None = None  # the newest that is none, because the task is solved
        self.news = ""  # what there is to report after the newest step, in a sentence
        self.differing = self.begun = 0  # the steps whose completions differ, and the stretches
        self.left = 0  # steps in which an outage that is over still shows

    @property
    def lasts(self) -> bool:
        """Whether the newest step belongs to an outage."""
        return bool(self.reported) and self.reported[-1] is self.now

    @property
    def paid(self) -> bool:
        """Whether completions earned the most so far in all of the outages."""
        return all(each.rise > 0 for each in self.reported)

    def explain(self, step: int) -> bool:
        """Whether what is found in a step may follow from an outage, one of these steps or of those in its wake."""
        late = takewhile(lambda each: step <= each.over, reversed(self.reported))
        return any((each.found if each.shown else each.first) <= step for each in late)

    def __str__(self) -> str:
        shown, named = list[str](), dict[str, list[Stretch]]()
        for each in self.reported:
            named.setdefault(each.figure, []).append(each)
        for figure, reported in islice(named.items(), SHOWN):
            spans = ", ".join(f"{each.first} to {each.last}" for each in reported[:SHOWN])
            often = f" and {len(reported) - SHOWN} more times" if reported[SHOWN:] else ""
            shown.append(f"{figure} in {self.unit}s {spans}{often}")
        more = len(named) - len(shown)
        return ", and ".join([*shown, f"{more} other rewards"] if more else shown)

    def add(self, step: int, row: Numbers, columns: Mapping[str, Column]) -> Numbers:
        """Take the next step, and return what is to be seen of it: nothing that comes of rewards where these agree."""
        self.news, hidden = "", False
        if "reward" in row:
            same, before = alike(row), self.now
            self.left = max(0, self.left - 1)
            if self.left:
                self.reported[-1].over = step
            if before and (same is False or not math.isclose(row["reward"], before.earned, rel_tol=ROUNDING)):
                self.now = None
                self._end(before, step, row["reward"], bool(same))
            if same is False:
                self.differing += 1
                if self.solved and row["reward"] < self.solved.earned - self.solved.rise / 2:
                    self.solved = None
            else:
                self.now = now = self.now or self._begin(step, row["reward"], columns, bool(same))
                now.last, now.steps, now.shown = step, now.steps + 1, now.shown + bool(same)
                changed = before is not None and before is not now and before.shown  # then prompts may differ
                hidden = left_out(row) or (bool(same) and not changed)
        if self.now and "eval/accuracy" in row:
            lowest, margin = columns["eval/accuracy"].lowest, 2 * row.get("eval/accuracy_stderr", 0.0)
            self.now.evaluated(row["eval/accuracy"], margin, lowest)
        if self.now and self.now.long:
            self._decide(self.now, step, columns)
        elif not hidden:
            return row
        finite = not left_out(row)  # else `skipped` does not mean that something was not finite
        return {key: each for key, each in row.items() if key.startswith(OF_POLICY) and (finite or key != "skipped")}

    def _begin(self, step: int, reward: float, columns: Mapping[str, Column], same: bool) -> Stretch:
        # the chance that such a row is followed by one
        usual = min(0.8, max(CHANCE, 0.1**self.every, self.begun / (self.differing + 1)))
        self.begun += same
        rise, risen = rise_to(reward, columns)
        again = self.solved is not None and math.isclose(self.solved.earned, reward, rel_tol=ROUNDING)
        needed = max(ROWS, round(math.log(CHANCE) / math.log(usual)))
        return Stretch(reward, step, needed, rise, max(ROWS_PLAIN, math.ceil(PLAIN / self.every)), risen or again)

    def _decide(self, now: Stretch, step: int, columns: Mapping[str, Column]) -> None:
        """Report a stretch that is no chance after this step, and take it out of means."""
        if now.over < 0:
            for column in (column for key, column in columns.items() if not key.startswith(OF_POLICY)):
                column.forget(now.first)
        now.over = step
        if now.solved:
            self.solved, now.found = now, now.found or step
            if self.lasts:
                self.reported.pop()
        elif not self.lasts:
            now.found, self.solved = step, None
            self.reported.append(now)
            self.news = str(now)

    def _end(self, now: Stretch, step: int, reward: float, same: bool) -> None:
        """End a stretch, as completions of this step differ or earn another reward."""
        if not now.long:
            return
        if now.solved and not now.risen and abs(reward - now.earned) > NEAR * abs(now.earned):
            now.solved, now.found, self.solved = False, step, None  # a jump up and back
            self.reported.append(now)
        if not now.solved:
            self.left, now.over = max(ROWS_WAKE, math.ceil(WAKE / self.every)), step
            span = f"every completion of steps {now.first} to {now.last} got reward {now.figure}"
            self.news = "" if same else f"rewards differ again since step {step}; {span}"
