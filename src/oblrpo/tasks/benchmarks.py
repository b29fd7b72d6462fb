"""Published benchmarks of mathematics: questions and gold answers, from files as published or from the hub."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oblrpo.errors import InputError, did_you_mean
from oblrpo.tasks.data import PLACEHOLDER, check_template
from oblrpo.tasks.grading.extract import last_box
from oblrpo.tasks.grading.normal import listed
from oblrpo.tasks.rows import text_of
from oblrpo.tasks.sources import Row, keep_rows, read_hub, read_source
from oblrpo.tasks.task import Problem

TEMPLATE = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""The default template of the prompts."""


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark asks for, where it stands on the hub, and how its rows are read."""

    about: str
    hub: tuple[str, str, str]  # dataset, configuration ("" for the only one), split
    questions: tuple[str, ...]  # columns that may hold the question; the first one that is there is read
    golds: Callable[[Row, str], tuple[str, ...]]
    """Returns the gold answers of a row; the text says where the row stands."""
    train: str = ""  # split on the hub that is meant for training; empty if there is none


def load_benchmark(
    name: str, files: Sequence[str] = (), split: str = "", where: Mapping[str, object] | None = None, template: str = ""
) -> list[Problem]:
    """Return the problems of a named benchmark, from its published files in the order given, or else from the hub.

    Their column `answer` is the gold answer, or a list of several, all of which must be given. `split` is a split on
    the hub other than the one that is reported on. `where` names columns and the values to keep. The question replaces
    {prompt} in the template.
    """
    if name not in BENCHMARKS:
        raise InputError(f"unknown benchmark '{name}'; known: {', '.join(BENCHMARKS)}.{did_you_mean(name, BENCHMARKS)}")
    template = template or TEMPLATE
    check_template(template)
    benchmark = BENCHMARKS[name]
    path, configuration, reported = benchmark.hub
    rows = read_source(files, split or reported) if files else read_hub(path, configuration, split or reported)
    problems = []
    for place, row in keep_rows(rows, where or {}):
        column = next((column for column in benchmark.questions if column in row), benchmark.questions[0])
        question, golds = text_of(row, column, place), benchmark.golds(row, place)
        columns = {"answer": golds[0] if len(golds) == 1 else list(golds)}
        text, several = template.replace(PLACEHOLDER, question), golds if len(golds) > 1 else ()
        problems.append(Problem(text, ", ".join(golds), columns, question, several))
    return problems


def _answer(row: Row, where: str) -> tuple[str, ...]:
    return (re.sub(r"\.0$", "", text_of(row, "answer", where)),)


def _after_hashes(row: Row, where: str) -> tuple[str, ...]:
    _, hashes, gold = text_of(row, "answer", where).rpartition("####")
    if not hashes or not gold.strip():
        raise InputError(f"{where}: column 'answer' holds no gold answer after ####.")
    return (gold.strip(),)


def _boxed(row: Row, where: str) -> tuple[str, ...]:
    if "solution" not in row and "answer" in row:  # the copy on the hub holds the gold answer alone
        return _answer(row, where)
    gold = last_box(text_of(row, "solution", where))
    if not gold:
        raise InputError(f"{where}: column 'solution' holds no gold answer in \\boxed{{}}.")
    return (gold.strip(),)


def _final_answers(row: Row, where: str) -> tuple[str, ...]:
    answers = row.get("final_answer")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(f"{where}: column 'final_answer' must be a list of texts that are not empty.")
    several = row.get("is_multiple_answer")
    if not isinstance(several, bool):
        raise InputError(f"{where}: column 'is_multiple_answer' must be true or false.")
    if not several:
        return (", ".join(answers),)
    return tuple(item for answer in answers for item in listed(answer.replace("$", ""), thousands=False))


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark("Solve word problems of grade-school arithmetic; the answer is a number.",
        ("openai/gsm8k", "main", "test"), ("question",), _after_hashes, "train"),
    "math500": Benchmark("Solve problems of high-school competitions (MATH); the answer is a formula.",
        ("HuggingFaceH4/MATH-500", "", "test"), ("problem",), _answer),
    "aime24": Benchmark("Solve the problems of the AIME of 2024; the answer is a whole number below 1,000.",
        ("HuggingFaceH4/aime_2024", "", "train"), ("problem",), _answer),
    "aime25": Benchmark("Solve the problems of the AIME of 2025; the answer is a whole number below 1,000.",
        ("math-ai/aime25", "", "test"), ("problem",), _answer),
    "amc23": Benchmark("Solve the problems of the AMC 12 of 2023; the answer is a number.",
        ("math-ai/amc23", "", "test"), ("question", "problem"), _answer),
    "olympiadbench": Benchmark("Solve problems of mathematical olympiads (OlympiadBench); the answers are formulas.",
        ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"), ("question",), _final_answers),
    "minerva_math": Benchmark("Solve problems of university science courses (Minerva Math); the answer is a formula.",
        ("math-ai/minervamath", "", "test"), ("problem", "question"), _boxed),
}  # fmt: skip
