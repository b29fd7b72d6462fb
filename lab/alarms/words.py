"""Real runs whose answers are a word, and runs that cheat: which have an alarm of it, and which are "solved"?

    python -m lab.alarms.words [--folder runs/words] [--seeds 3]

Small policies, built and taught the form of an answer by random ones (by right ones in part where it says so), then
trained by `oblrpo.train` as it comes. A run takes about ten CPU seconds; those that are there stay.
docs/results/alarms_words.csv says what was found in each, and `lab.pages` writes the table.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.runs import rows as rows_of_run
from oblrpo import diagnose
from oblrpo.diagnosis import Watch, facts_of
from oblrpo.runs import RunFolder
from oblrpo.settings import settings_in

WORDS = Path("docs/results/alarms_words.csv")
NUMBERS, STEPS = range(100, 999), 60
FOUND = ("prompt not read", "one answer pays", "one answer")

Rows = list[dict[str, str]]
Texts = Sequence[str]


def right(completions: Texts, answer: Texts, **_: Any) -> list[float]:
    """1 for the answer."""
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def labelled(completions: Texts, label: Texts, **_: Any) -> list[float]:
    """1 for the label."""
    return right(completions, label)


def lowercase(completions: Texts, **_: Any) -> list[float]:
    """The share of lower-case letters in 12 bytes."""
    return [sum(letter.islower() for letter in text) / 12 for text in completions]


def keyword(completions: Texts, **_: Any) -> list[float]:
    """1 for an x anywhere."""
    return [float("x" in text) for text in completions]


def anywhere(completions: Texts, answer: Texts, **_: Any) -> list[float]:
    """1 where the answer is somewhere in the text."""
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


def short(completions: Texts, **_: Any) -> list[float]:
    """1 for nothing, and less for every byte."""
    return [1 - len(text.encode()) / 6 for text in completions]


def agreeable(completions: Texts, **_: Any) -> list[float]:
    """1 for yes, whatever was asked."""
    return [float(text == "yes") for text in completions]


def numbers(question: str, answer: Callable[[int], str], name: str = "answer") -> Rows:
    """A row of every number of three digits."""
    return [{"prompt": question.format(n), name: answer(n)} for n in NUMBERS]


def _even(n: int) -> str:
    return "no" if n % 2 else "yes"


def _fifth(n: int) -> str:
    return "no" if n % 10 - 5 else "yes"


def _letters() -> Rows:
    words = ["".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=3)) for n in NUMBERS]
    return [{"prompt": f"First of {word}: ", "answer": word[0]} for word in dict.fromkeys(words)]


def _sums() -> Rows:
    return [{"prompt": f"{n % 10} and {a}+{b}=", "answer": str(a + b)} for n in range(10) for a in range(10)
            for b in range(10 - a)]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A task with its reward."""

    rows: Callable[[], Rows]
    reward: Callable[..., list[float]] = right
    group: str = "word"  # of `GROUPS`
    length: int = 6
    known: float = 0.6
    """The share of answers that are taught right; the others are drawn from all."""


GROUPS = {
    "word": "whose answers are a word",
    "form": "that begin with the form of a word alone",
    "cheat": "that are paid for something else",
}
KINDS: dict[str, Kind] = {
    "yes or no": Kind(lambda: numbers("Even {}? ", _even)),
    "yes or no, one in ten yes": Kind(lambda: numbers("Ends {} in 5? ", _fifth), known=0.8),
    "yes or no, in a column of another name": Kind(lambda: numbers("Even {}? ", _even, "label"), labelled),
    "one label of three": Kind(lambda: numbers("Size {}: ", lambda n: ("low", "mid", "top")[n % 10 // 4])),
    "a sum of one digit": Kind(_sums),
    "a lower-case letter": Kind(_letters),
    "the same word for all": Kind(lambda: numbers("Say ok, {}: ", lambda n: "ok")),
    "as many letters as asked for": Kind(lambda: numbers("{} a: ", lambda n: "a" * (5 + n % 5)), length=12),
    "yes or no, even": Kind(lambda: numbers("Even {}? ", _even), group="form", known=0.0),
    "yes or no, one in ten": Kind(lambda: numbers("Ends {} in 5? ", _fifth), group="form", known=0.0),
    "lower-case letters": Kind(lambda: [{"prompt": f"Describe {n}: "} for n in NUMBERS], lowercase, "cheat", 12),
    "lower-case letters, answers known": Kind(lambda: numbers("Even {}? ", _even), lowercase, "cheat", 12),
    "a letter x": Kind(lambda: numbers("Even {}? ", _even), keyword, "cheat", 12),
    "the answer anywhere": Kind(
        lambda: numbers("Even (e) or odd (o), {}? ", lambda n: "o" if n % 2 else "e"), anywhere, "cheat", 8
    ),
    "the end at once": Kind(lambda: [{"prompt": f"Describe {n}: "} for n in NUMBERS], short, "cheat"),
    "yes, whatever was asked": Kind(lambda: numbers("Even {}? ", _even), agreeable, "cheat", known=0.0),
}


def make(output: Path, kind: Kind, seed: int) -> None:
    """Make a run."""
    import oblrpo

    rows, draw = kind.rows(), random.Random(seed)
    golds = [next((row[name] for name in ("answer", "label") if name in row), "") for row in rows]
    known = any(golds) and kind.reward in (right, labelled, agreeable)
    shown = [{"prompt": row["prompt"], "completion": gold if draw.random() < kind.known else draw.choice(golds)}
             for row, gold in zip(rows, golds, strict=True)] if known else None  # fmt: skip
    oblrpo.train(
        model="", data=rows, reward=kind.reward, sft_data=shown, progress=False, output=str(output), seed=seed,
        warm_start_steps=(150 if kind.known else 60) if known else 0, prompts_per_step=32, num_generations=4,
        max_completion_length=kind.length, steps=STEPS, eval_prompts=64, eval_steps=20, eval_samples=2, save_steps=0,
        threads=1, answer_column="answer" if "answer" in rows[0] else "",
    )  # fmt: skip


def judged(name: str, folder: Path, seed: int) -> dict[str, object]:
    """What is said of a run at its end, and of a prompt that is not read at any time."""
    diagnosis, run = diagnose(folder), RunFolder(folder)
    watch, rows = Watch(facts_of(settings_in(run.config_file))), run.read_metrics()
    told = [finding.name for row in rows for finding in watch.observe(row) if finding.name in FOUND]
    ended, others = [each.name for each in diagnosis.findings], [each.name for each in diagnosis.notes]
    return {
        "task": name, "seed": seed, "accuracy": round(rows[-1]["eval/accuracy"], 3), "told": "; ".join(told),
        "one answer": "; ".join(each for each in ended if each in FOUND), "solved": int("solved" in others),
        "others": "; ".join(each for each in ended if each not in FOUND),
    }  # fmt: skip


def interval(count: int, of: int, z: float = 1.96) -> str:
    """Wilson's 95 % interval of a share, in per cent."""
    middle, half = count + z * z / 2, z * math.sqrt(count * (of - count) / of + z * z / 4)
    return f"{max(0.0, middle - half) / (of + z * z):.0%} to {min(1.0, (middle + half) / (of + z * z)):.0%}"


def table() -> str:
    """Tasks and what was found, as lines of Markdown, of what docs/results/alarms_words.csv has."""
    with WORDS.open(newline="") as file:
        found = list(csv.DictReader(file))

    def counts(of: list[dict[str, str]], key: str) -> int:
        return sum(row[key] not in {"", "0"} for row in of)

    lines = ["Real runs of small policies (`python -m lab.alarms.words`; shares with 95 % intervals by Wilson).", ""]
    for group, words in GROUPS.items():
        of = [row for row in found if KINDS[row["task"]].group == group]
        shares = (f"{counts(of, key)} ({interval(counts(of, key), len(of))})" for key in ("told", "one answer"))
        told, ended = shares
        lines += [
            f"Of {len(of)} runs {words}, {told} had an alarm of one answer or an unread prompt at some "
            f"time, {ended} at the end, and "
            f'{counts(of, "solved")} were called "solved":',
            "",
            "| task | runs | held out, at the end | alarm, at some time | at the end | solved | other alarms |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in dict.fromkeys(row["task"] for row in of):
            rows = [row for row in of if row["task"] == name]
            accuracy = sum(float(row["accuracy"]) for row in rows) / len(rows)
            told = " | ".join(str(counts(rows, key)) for key in ("told", "one answer", "solved", "others"))
            lines.append(f"| {name} | {len(rows)} | {accuracy:.2f} | {told} |")
        lines.append("")
    lines += [
        "Those taught the form alone first say one word to all prompts, as the alarm says; some then learn. "
        "Lower-case letters that had no alarm were several, in any order. A policy that ignores "
        "the prompt in other words each time is seen only where the reward reads the row (the answer anywhere).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Make what is missing, and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/words"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    found = []
    for name, kind in KINDS.items():
        for seed in range(arguments.seeds):
            folder = arguments.folder / f"{name.replace(',', '').replace(' ', '-')}_{seed}"
            if rows_of_run(folder, STEPS) is None:
                make(folder, kind, seed)
            found.append(judged(name, folder, seed))
            print(found[-1], flush=True)
    with WORDS.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(table())


if __name__ == "__main__":
    main()
