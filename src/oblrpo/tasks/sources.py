"""Rows of a data set: from JSON Lines, CSV, Parquet and Arrow files, or from the Hugging Face hub."""

import csv
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, did_you_mean, pip_install
from oblrpo.regular_files import regular
from oblrpo.tasks.rows import read_objects, unreadable, value_at

Row = dict[str, Any]
Rows = list[tuple[str, Row]]  # where each row stands, and its columns
Stream = Iterable[tuple[str, Row]]  # the same, perhaps read lazily from a file, and only once


def read_source(names: Sequence[str], split: str = "train", given: Mapping[str, Rows] | None = None) -> Stream:
    """Return the rows of files, one after the other, or of one data set of the hub.

    The name of a data set is `owner/name`, `owner/name:configuration` or either of them with a split behind it, such as
    `owner/name[test]`. Rows in `given` are there already, by the name that stands for them.
    """
    if given and len(names) == 1 and names[0] in given:
        return given[names[0]]
    if len(names) == 1 and is_hub_name(names[0]):
        name, _, named = names[0].removesuffix("]").partition("[")
        path, _, configuration = name.partition(":")
        return read_hub(path, configuration, named or split)
    paths = map(Path, names)
    return chain.from_iterable(READERS.get(path.suffix.lower(), _read_jsonl)(path) for path in paths)


def is_hub_name(name: str) -> bool:
    """Return whether a name means a data set of the hub: it has one slash, no such file is there, no ending of one."""
    path, known = Path(name), Path(name.partition("[")[0] if name.endswith("]") else name)  # without its split
    return (
        known.as_posix().count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not path.exists()
        and not {path.suffix, known.suffix} & READERS.keys()
    )


def read_hub(path: str, configuration: str, split: str) -> Rows:
    """Return the rows of a data set of the hub."""
    datasets = _library("datasets", f"to load {path} from the hub")
    try:
        rows = datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:  # no network, no such revision, a full disk ...
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot load {path} ({split}) from the hub: {reason}; or give a file (--data).") from error
    return [(f"{path} row {index}", dict(row)) for index, row in enumerate(rows)]


def keep_rows(rows: Stream, where: Mapping[str, Any]) -> Stream:
    """Return the rows whose columns have the given values, or one of those in a list."""
    if not where:
        return rows
    rows = list(rows)
    for column in where:
        for place, row in rows:
            if value_at(row, column, row) is row:
                raise InputError(f"where: {place} has no column '{column}'.{did_you_mean(column, row)}")
    allowed = {column: value if isinstance(value, list) else [value] for column, value in where.items()}
    kept = [
        placed for placed in rows if all(value_at(placed[1], column) in values for column, values in allowed.items())
    ]
    if rows and not kept:
        raise InputError(f"where {dict(where)} leaves none of {len(rows)} rows; a number and its text are not equal.")
    return kept


def _read_jsonl(path: Path) -> Stream:
    return ((f"{path} line {line}", row) for line, row in read_objects(path))


def _read_csv(path: Path) -> Rows:
    limit = csv.field_size_limit()
    try:
        with regular(path).open(newline="", encoding="utf-8-sig") as file:
            csv.field_size_limit(max(path.stat().st_size, limit))  # of the process; by default 131,072 characters
            reader = csv.DictReader(file, strict=True, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            rows = [(f"{path} line {reader.line_num}", dict(row)) for row in reader]
            names = reader.fieldnames or []
    except csv.Error as error:
        raise InputError(f"Cannot read the data file {path}: {error}; check its quotes.") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    finally:
        csv.field_size_limit(limit)
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), "")):
        raise InputError(f"{path}: the separator seems to be {other!r}; save the file with commas, or as JSON Lines.")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{path} has two columns '{twice}'; rename one.")
    for where, row in rows:
        if None in row or None in row.values():
            raise InputError(f"{where} has more or fewer fields than the first line has names.")
    if not rows:
        raise InputError(f"{path} holds no rows; give a first line of column names, then one line per row.")
    return [(where, {str(name): value for name, value in row.items()}) for where, row in rows]


def _read_table(path: Path) -> Rows:
    is_arrow = path.suffix.lower() == ".arrow"  # as `datasets` writes one
    arrow = _library("pyarrow" if is_arrow else "pyarrow.parquet", f"to read {path}")
    try:
        with regular(path).open("rb") as file:
            rows = (arrow.ipc.open_stream(file).read_all() if is_arrow else arrow.read_table(file)).to_pylist()
    except Exception as error:  # pyarrow raises many kinds
        raise unreadable(path, error) from error
    if not rows:
        raise InputError(f"{path} holds no rows.")
    return [(f"{path} row {index}", row) for index, row in enumerate(rows)]


def _library(name: str, purpose: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise InputError(f"{name.partition('.')[0]} is needed {purpose}; install it with: {pip_install('data')}")
    return importlib.import_module(name)


READERS = {
    ".jsonl": _read_jsonl, ".json": _read_jsonl, ".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_table,
    ".arrow": _read_table,
}  # fmt: skip
