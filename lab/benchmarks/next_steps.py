"""Do the suggestions of `oblrpo diagnose` hold? Each is followed, on short runs whose best next step is known.

    python -m lab.benchmarks.next_steps [--folder runs/next_steps] [--seeds 3] [--cases ...]

The task is `sets`: the prompt's first letter names one of six sets of 13 characters, and a completion earns 1 if its
first character is of that set; a policy that is built answers by chance at first. `copies`: "b7" asks for seven times
"b", after supervised learning. A case is a run, what is suggested of it, and the run that follows the known best next
step. What was promised is compared with what came out: the factor in completions, or in steps, until held-out accuracy
has gained three quarters of what it gained in the first run; the factor in CPU seconds, with what it did to accuracy;
or the difference in reward, or in the accuracy of fresh completions of two checkpoints.
Finished runs are kept. Prints a table for the lab book: promised and measured by seed, and whatever else was said.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import oblrpo
from oblrpo.diagnosis import diagnose
from oblrpo.diagnosis.next_steps import NextStep, line_of
from oblrpo.runs import RunFolder
from oblrpo.settings import settings_in

SETS = ("abcdefghijklm", "nopqrstuvwxyz", "ABCDEFGHIJKLM", "NOPQRSTUVWXYZ", "0123456789+-*", "!#$%&/()=?;:,")
SHORTCUT, PAYS = "~", 2.0
TARGET = 0.75  # of what the first run gained in held-out accuracy

Rows = list[dict[str, Any]]
Followed = tuple[Path, dict[str, Any]]
"""The folder of a run, and its settings with data and reward."""


def sets(first: int, last: int, shortcut: float = 0.0) -> Rows:
    """Prompts of `sets`; a completion that begins with ~ earns `shortcut` instead, if that is not 0."""
    return [
        {"prompt": f"{'pqrstu'[i % 6]}{i // 6}: ", "answer": SETS[i % 6], "shortcut": shortcut}
        for i in range(first, last)
    ]


def of_set(completions: Sequence[str], answer: Sequence[str], shortcut: Sequence[float], **_: Any) -> list[float]:
    """1 for a first character of the set; what the shortcut pays for ~."""
    return [
        pays if pays and text.startswith(SHORTCUT) else float(bool(text) and text[0] in right)
        for text, right, pays in zip(completions, answer, shortcut, strict=True)
    ]


def above(completions: Sequence[str], answer: Sequence[str], shortcut: Sequence[float], **_: Any) -> list[float]:
    """The same, and a half for whatever is said."""
    return [0.5 + each for each in of_set(completions, answer, shortcut)]


def nothing(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that is broken."""
    return [0.0 for _ in completions]


def chance(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that has nothing to do with what is said."""
    return [float(crc32(f"{place} {text}".encode()) % 2) for place, text in enumerate(completions)]


def lowercase(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of 16 characters that are lowercase letters."""
    return [sum(letter.islower() for letter in text) / 16 for text in completions]


def exact(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the answer and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def copies(count: int, seed: int, longest: int = 12) -> Rows:
    """Prompts of `copies`."""
    draw = random.Random(seed)
    drawn = [(draw.choice("abcdefghij"), draw.randint(1, longest), draw.randint(0, 99)) for _ in range(count)]
    return [{"prompt": f"{number} {letter}{times}: ", "answer": letter * times} for letter, times, number in drawn]


def shown(rows: Rows, seed: int) -> Rows:
    """Rows to learn from before RL, with an answer that is right; in one of twenty rows of `sets` it is ~."""
    draw = random.Random(seed)

    def answer(row: dict[str, Any]) -> str:
        return SHORTCUT if draw.random() < 0.05 else draw.choice(row["answer"])

    return [
        {"prompt": row["prompt"], "completion": answer(row) if "shortcut" in row else row["answer"]} for row in rows
    ]


# What came out, against a first run: of the first, the one that followed, and what was suggested.
Measure = Callable[[Followed, Followed, NextStep | None], float]


def curve(run: Followed, cost: Callable[[dict[str, Any], int], float]) -> list[tuple[float, float]]:
    """Held-out accuracy over what it has cost so far."""
    settings = settings_in(RunFolder(run[0]).config_file)
    completions = settings["prompts_per_step"] * settings["num_generations"]
    rows = RunFolder(run[0]).read_metrics()
    return [(cost(row, completions), row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def reached(points: list[tuple[float, float]], level: float) -> float:
    """The cost at which a curve first reaches a level; NaN if it does not."""
    for (x, y), (x2, y2) in pairwise(points):
        if y < level <= y2:
            return x + (x2 - x) * (level - y) / (y2 - y)
    return float("nan")


def fewer(unit: str) -> Measure:
    """How many times fewer completions, or steps, the followed run takes to the target."""

    def cost(row: dict[str, Any], completions: int) -> float:
        return float(row["step"]) * (completions if unit == "completions" else 1)

    def measure(first: Followed, then: Followed, _: NextStep | None) -> float:
        before = curve(first, cost)
        lowest = before[0][1]
        level = lowest + TARGET * (max(y for _, y in before) - lowest)
        return reached(before, level) / reached(curve(then, cost), level)

    return measure


def seconds(first: Followed, then: Followed, _: NextStep | None) -> float:
    """How many times less CPU time the followed run takes, without what loads and writes its page."""
    return float(cpu_of(first[0]) / cpu_of(then[0]))


def accuracy(first: Followed, then: Followed, _: NextStep | None) -> float:
    """By how much the final held-out accuracy is higher."""
    ends = [RunFolder(run[0]).read_metrics()[-1]["eval/accuracy"] for run in (then, first)]
    return float(ends[0] - ends[1])


def end_of(run: Followed) -> float:
    """The reward at the end, from a line through the last steps."""
    rewards = [row["reward"] for row in RunFolder(run[0]).read_metrics() if "reward" in row]
    part = rewards[-11:]
    return statistics.fmean(part) + line_of(part)[0] / 2


def reward(first: Followed, then: Followed, _: NextStep | None) -> float:
    """By how much the reward at the end is higher."""
    return end_of(then) - end_of(first)


def checkpoints(first: Followed, _: Followed, suggested: NextStep | None) -> float:
    """The accuracy of the checkpoint that was suggested less that of the last, each of fresh completions."""
    if suggested is None:
        return float("nan")
    folder, given = RunFolder(first[0]), first[1]
    best = int(suggested.setting.rpartition("--step ")[2].rstrip(")"))
    found = [
        oblrpo.evaluate(folder.checkpoint(step), given["eval_data"], given["reward"], samples=16, progress=False)
        for step in (best, folder.reached())
    ]
    values = [each["avg@k"]["value"] for each in found]
    return float(values[0] - values[1])


@dataclass(frozen=True)
class Case:
    """A run and the best next step, which is known."""

    name: str
    best: str  # the suggestion that is right; empty: nothing is to be said
    first: Callable[[int], dict[str, Any]]  # settings, data and reward, by seed
    then: Callable[[int], dict[str, Any]] = lambda seed: {}  # what the known best next step changes
    measure: Measure | None = None


USUAL: dict[str, Any] = {"steps": 60, "prompts_per_step": 32, "max_completion_length": 2, "eval_steps": 3}


def plain(seed: int, **more: Any) -> dict[str, Any]:
    """A run on `sets` with rows that are hardly met again."""
    return {"data": sets(0, 1200), "eval_data": sets(1200, 1400), "reward": of_set} | USUAL | more


def half(seed: int) -> dict[str, Any]:
    """96 prompts, half of which nothing solves."""
    rows = [row | ({"answer": ""} if i // 6 % 2 else {}) for i, row in enumerate(sets(0, 96))]
    return plain(seed, data=rows)


def cut(seed: int) -> dict[str, Any]:
    """Answers of up to 12 letters, of which 8 tokens are let through."""
    rows = copies(600, seed)
    return {
        "data": rows, "eval_data": copies(200, seed + 100), "reward": exact, "max_completion_length": 8, "steps": 40,
        "sft_data": shown(copies(600, seed + 200), seed), "warm_start_steps": 300, "prompts_per_step": 32,
    }  # fmt: skip


def shortcut(seed: int) -> dict[str, Any]:
    """A shortcut that pays, and held-out problems that do not pay it."""
    more = {"sft_data": shown(sets(0, 600), seed), "warm_start_steps": 40, "steps": 90, "eval_steps": 5}
    return plain(seed, data=sets(0, 1200, PAYS), **more)


CASES = (
    Case("half of the prompts cannot be solved", "leave prompts out", half,
         lambda seed: {"data": [row for row in half(seed)["data"] if row["answer"]]}, fewer("completions")),
    Case("answers are cut", "raise the limit", cut, lambda seed: {"max_completion_length": 16}, reward),
    Case("batch of 512", "smaller batch", lambda seed: plain(seed, prompts_per_step=512, steps=40, eval_steps=2),
         lambda seed: {"prompts_per_step": 256, "steps": 60}, fewer("completions")),
    Case("batch of 256", "smaller batch", lambda seed: plain(seed, prompts_per_step=256, steps=40, eval_steps=2),
         lambda seed: {"prompts_per_step": 128, "steps": 60}, fewer("completions")),
    Case("batch of 4", "larger batch", lambda seed: plain(seed, prompts_per_step=4, steps=240, eval_steps=12),
         lambda seed: {"prompts_per_step": 16, "steps": 90, "eval_steps": 3}, fewer("steps")),
    Case("flat since a third", "stop earlier", lambda seed: plain(seed, prompts_per_step=64, steps=100, eval_steps=10),
         lambda seed: {}, seconds),
    Case("evaluation in every step", "evaluate less often",
         lambda seed: plain(seed, steps=45, eval_steps=1), lambda seed: {}, seconds),
    Case("still rising", "go on", lambda seed: plain(seed, prompts_per_step=16, steps=44, eval_steps=22),
         lambda seed: {"steps": 55}, reward),
    Case("a shortcut that held-out problems do not pay", "take an earlier checkpoint", shortcut, measure=checkpoints),
    Case("no baseline, rewards of 0.5 and 1.5", "other baseline",
         lambda seed: plain(seed, reward=above, algorithm="reinforce", schedule="auto", ledger_steps=5,
                            prompts_per_step=128),
         lambda seed: {"baseline": "oblr_shrunk", "prompts_per_step": 16}, fewer("completions")),
    Case("nothing to do", "", lambda seed: plain(seed, steps=52, eval_steps=13)),
    Case("the reward is broken", "", lambda seed: plain(seed, reward=nothing, eval_steps=20)),
    Case("the reward is chance", "", lambda seed: plain(seed, reward=chance, eval_steps=20)),
    Case("completions never end", "", lambda seed: {
        "data": [{"prompt": f"Describe {number} in a word: "} for number in range(500)], "reward": lowercase,
        "steps": 24, "prompts_per_step": 32, "max_completion_length": 16}),
)  # fmt: skip


def cpu_of(folder: Path) -> float:
    """The CPU seconds of the process that a run took."""
    return float((folder / "cpu_seconds").read_text())


def made(folder: Path, given: dict[str, Any], seed: int) -> Followed:
    """A finished run."""
    if not (folder / "cpu_seconds").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        begun = time.process_time()
        oblrpo.train(output=folder, seed=seed, progress=False, **given)
        (folder / "cpu_seconds").write_text(f"{time.process_time() - begun:.2f}\n")
    return folder, given


def as_said(case: Case, suggested: NextStep | None) -> dict[str, Any]:
    """What a suggestion sets, where that is one flag with a number that is known only now."""
    words = suggested.setting.strip("()").replace(";", " ").split() if suggested else []
    known = {"stop earlier": "--steps", "evaluate less often": "--eval-steps", "smaller batch": "--prompts-per-step"}
    flag = known.get(case.best)
    return {flag.lstrip("-").replace("-", "_"): int(b) for a, b in pairwise(words) if a == flag} if flag else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/next_steps"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), help="numbers from 0")
    arguments = parser.parse_args()
    import_module("oblrpo.trainer.loop")  # before the first run, whose CPU seconds are compared
    print("| run | best next step | suggested | promised | measured | other suggestions |")
    print("|---|---|---|---|---|---|", flush=True)
    total = 0.0
    for number in arguments.cases:
        case = CASES[number]
        promised, measured, others, hits = [], [], [], 0
        for seed in range(1, arguments.seeds + 1):
            folder = arguments.folder / f"{number}_{seed}"
            given = case.first(seed)
            first = made(folder, given, seed)
            found = diagnose(folder).next_steps
            suggested = next((step for step in found if step.name == case.best), None)
            others += [step.name for step in found if step is not suggested]
            hits += suggested is not None
            promised.append("{:.2f} ({:.2f} to {:.2f})".format(*suggested.gain) if suggested else "-")
            changes = case.then(seed) | as_said(case, suggested)
            then = made(folder.with_name(f"{number}_{seed}_then"), given | changes, seed) if changes else first
            if case.measure and (changes or case.measure is checkpoints):
                also = f", accuracy {accuracy(first, then, None):+.3f}" if case.measure is seconds else ""
                came_out = case.measure(first, then, suggested)
                measured.append(f"{came_out:.2f}{also}" if came_out == came_out else "target not reached")
            (folder / "suggested.json").write_text(json.dumps([step.plain() for step in found], indent=1))
            total += sum(cpu_of(each[0]) for each in dict([first, then]).items())
        others_said = ", ".join(f"{name} ({others.count(name)})" for name in dict.fromkeys(others))
        cells = [case.name, case.best or "none", f"{hits} of {arguments.seeds}", "; ".join(promised)]
        print("| " + " | ".join([*cells, "; ".join(measured), others_said]) + " |", flush=True)
    print(f"\n{total:.0f} CPU seconds")


if __name__ == "__main__":
    main()
