"""Published benchmarks of mathematics: questions and gold answers, from files as published or from the hub."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oblrpo.errors import InputError, did_you_mean
from oblrpo.tasks.grading.extract import last_box
from oblrpo.tasks.grading.normal import listed
from oblrpo.tasks.rows import read_objects, text_of

Row = dict[str, object]


@dataclass(frozen=True)
class BenchmarkProblem:
    """One question; several gold answers must all be given."""

    index: int
    """Row of the data, counted from 0 through all its files."""
    question: str
    golds: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lies on the hub, and how its rows are read."""

    hub: tuple[str, str, str]
    """Dataset, configuration ("" for the only one), split."""
    questions: tuple[str, ...]
    """Columns that may hold the question; the first that is there."""
    golds: Callable[[Row, str], tuple[str, ...]]


def load_benchmark(name: str, files: Sequence[str | Path] = ()) -> list[BenchmarkProblem]:
    """Return the problems of a named benchmark, from JSONL files one after the other, or from the hub if none is given.

    Raises:
        InputError: no such benchmark, a row that does not fit it (named by file, line and column), or no `datasets`.
    """
    if name not in BENCHMARKS:
        raise InputError(
            f"unknown benchmark '{name}'; choose one of: {', '.join(BENCHMARKS)}.{did_you_mean(name, BENCHMARKS)}"
        )
    benchmark = BENCHMARKS[name]
    rows = [(f"{path} line {line}", row) for path in files for line, row in read_objects(Path(path))] or _from_hub(
        name, benchmark
    )
    problems = []
    for index, (where, row) in enumerate(rows):
        column = next((column for column in benchmark.questions if column in row), benchmark.questions[0])
        problems.append(BenchmarkProblem(index, text_of(row, column, where), benchmark.golds(row, where)))
    return problems


def _from_hub(name: str, benchmark: Benchmark) -> list[tuple[str, Row]]:
    path, configuration, split = benchmark.hub
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"benchmark '{name}' needs its file (--data) or, to load {path} from the hub, the library datasets: "
            "pip install datasets"
        )
    try:
        rows = importlib.import_module("datasets").load_dataset(path, configuration or None, split=split)
    except Exception as error:  # no network, no such revision, a full disk: the library raises whatever it likes
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot load {path} from the hub ({reason}); give the file with --data.") from error
    return [(f"{path} row {index}", dict(row)) for index, row in enumerate(rows)]


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
    "gsm8k": Benchmark(("openai/gsm8k", "main", "test"), ("question",), _after_hashes),
    "math500": Benchmark(("HuggingFaceH4/MATH-500", "", "test"), ("problem",), _answer),
    "aime24": Benchmark(("HuggingFaceH4/aime_2024", "", "train"), ("problem",), _answer),
    "aime25": Benchmark(("math-ai/aime25", "", "test"), ("problem",), _answer),
    "amc23": Benchmark(("math-ai/amc23", "", "test"), ("question", "problem"), _answer),
    "olympiadbench": Benchmark(("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"), ("question",), _final_answers),
    "minerva_math": Benchmark(("math-ai/minervamath", "", "test"), ("problem", "question"), _boxed),
}
