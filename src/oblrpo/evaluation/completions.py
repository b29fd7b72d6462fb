"""Completions from a file, and results as the terminal shows them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from oblrpo.errors import InputError
from oblrpo.tasks.rows import read_objects

NAMED = 5  # of many indices, how many an error names


def read_completions(path: Path, problems: int) -> list[list[str]]:
    """Return the completions of every problem from rows `{"index": 3, "completion": "..."}`, equally many of each.

    With a column `sample`, no (index, sample) may come twice.
    """
    completions: list[list[str]] = [[] for _ in range(problems)]
    seen: dict[tuple[int, str], int] = {}
    for line, row in read_objects(path):
        where = f"{path} line {line}"
        index, text = row.get("index"), row.get("completion")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < problems:
            raise InputError(f"{where}: column 'index' must be a row of the data, from 0 to {problems - 1}.")
        if not isinstance(text, str):
            raise InputError(f"{where}: column 'completion' must be text.")
        if "sample" in row:
            first = seen.setdefault((index, repr(row["sample"])), line)
            if first != line:
                raise InputError(f"{where}: index {index}, sample {row['sample']!r} was in line {first} already.")
        completions[index].append(text)
    if missing := [index for index, texts in enumerate(completions) if not texts]:
        raise InputError(f"{path} has no completion for {_names(missing)}; every problem of the data needs one.")
    usual = Counter(map(len, completions)).most_common(1)[0][0]
    if odd := [index for index, texts in enumerate(completions) if len(texts) != usual]:
        raise InputError(
            f"{path} has more or fewer completions for {_names(odd)} than the {usual} of other problems; give equally "
            "many of each."
        )
    return completions


def _names(indices: list[int]) -> str:
    rest = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"index {', '.join(map(str, indices[:NAMED]))}{rest}"


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return results as a table for the terminal."""
    shown = Table("", "problems", "", "value", "95 % interval")
    for result in results:
        rows = [(f"avg@{result['samples']}", result["avg@k"])]
        rows += [(f"{name}@{k}", value) for name in ("pass", "maj") for k, value in result.get(f"{name}@k", {}).items()]
        for line, (name, estimate) in enumerate(rows):
            first = (_title(result), f"{result['problems']} x {result['samples']}") if line == 0 else ("", "")
            interval = " - ".join(f"{end:.4f}" for end in estimate["interval"] or ()) or "(one problem)"
            shown.add_row(*first, name, f"{estimate['value']:.4f}", interval)
        shown.add_section()
    return shown


def remarks(result: dict[str, Any]) -> str:
    """Return one line on what could not be graded, and on lengths where they are known."""
    kinds = ("timeouts", "unparsable", "crashed", "uncompared", "masked")
    parts = [f"{result[what]} {what}" for what in kinds if what in result]
    if "threshold" in result:
        parts.insert(0, f"rewards {' + '.join(result['rewards'])}, pass: a reward of at least {result['threshold']:g}")
    if "mean_length" in result:
        parts += [f"{result['mean_length']:.0f} tokens per completion", f"{result['clipped_ratio']:.1%} cut off"]
    return f"{_title(result)}: {', '.join(parts)}"


def _title(result: dict[str, Any]) -> str:
    return str(result.get("benchmark") or result["data"])
