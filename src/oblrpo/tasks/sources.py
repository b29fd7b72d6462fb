"""Rows of a data set: from JSON Lines, CSV, Parquet and Arrow files, or from the Hugging Face hub."""

import csv
import importlib
import importlib.util
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, did_you_mean, pip_install
from oblrpo.regular_files import regular
from oblrpo.tasks.rows import Item, Lazy, read_objects, unreadable, value_at

Row = dict[str, Any]
Rows = Sequence[tuple[str, Row]]  # where each row stands, and its columns


def read_source(names: Sequence[str], split: str = "train", given: Mapping[str, Rows] | None = None) -> Rows:
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
    parts = [READERS.get(path.suffix.lower(), _read_jsonl)(path) for path in map(Path, names)]
    return joined(parts)


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


def joined(parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
    """Return the items of several sequences, one behind the other."""
    ends = list(accumulate(map(len, parts)))

    def item(index: int) -> Item:
        part = bisect_right(ends, index)
        return parts[part][index - ends[part]]

    return parts[0] if len(parts) == 1 else Lazy(item, range(sum(map(len, parts))))


def keep_rows(rows: Rows, where: Mapping[str, Any]) -> Rows:
    """Return the rows whose columns have the given values, or one of those in a list."""
    if not where:
        return rows
    allowed = {column: value if isinstance(value, list) else [value] for column, value in where.items()}
    kept = array("q")
    for index, (place, row) in enumerate(rows):
        found = {column: value_at(row, column, row) for column in where}
        if missing := next((column for column, value in found.items() if value is row), ""):
            raise InputError(f"where: {place} has no column '{missing}'.{did_you_mean(missing, row)}")
        if all(found[column] in values for column, values in allowed.items()):
            kept.append(index)
    if rows and not kept:
        raise InputError(f"where {dict(where)} leaves none of {len(rows)} rows; a number and its text are not equal.")
    return Lazy(rows.__getitem__, kept)


def _read_jsonl(path: Path) -> Rows:
    name = str(path)
    return Lazy(lambda numbered: (f"{name} line {numbered[0]}", numbered[1]), read_objects(path))


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
    _refuse_twice(path, names)
    for where, row in rows:
        if None in row or None in row.values():
            raise InputError(f"{where} has more or fewer fields than the first line has names.")
    if not rows:
        raise InputError(f"{path} holds no rows; give a first line of column names, then one line per row.")
    return [(where, {str(name): value for name, value in row.items()}) for where, row in rows]


def _read_table(path: Path) -> Rows:
    is_arrow = path.suffix.lower() == ".arrow"  # as `datasets` writes one
    arrow = _library("pyarrow", f"to read {path}")
    pool = arrow.default_memory_pool()
    try:
        with regular(path).open("rb") as file:
            # In small parts, by one thread and on the system's heap, which together takes the least memory.
            arrow.set_memory_pool(arrow.system_memory_pool())
            if is_arrow:
                table = arrow.ipc.open_stream(file).read_all()
            else:
                parts = _library("pyarrow.parquet").ParquetFile(file)
                table = arrow.Table.from_batches(parts.iter_batches(1 << 14, use_threads=False), parts.schema_arrow)
    except Exception as error:  # pyarrow raises many kinds
        raise unreadable(path, error) from error
    finally:
        arrow.set_memory_pool(pool)
    if not len(table):
        raise InputError(f"{path} holds no rows.")
    _refuse_twice(path, table.column_names)

    @lru_cache(maxsize=1)
    def block(number: int) -> list[Row]:
        try:
            rows: list[Row] = table.slice(64 * number, 64).to_pylist()
        except Exception as error:
            raise unreadable(path, error) from error
        return rows

    return Lazy(lambda index: (f"{path} row {index}", block(index // 64)[index % 64]), range(len(table)))


def _refuse_twice(path: Path, names: Sequence[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{path} has two columns '{twice}'; rename one.")


def _library(name: str, purpose: str = "") -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise InputError(f"{name.partition('.')[0]} is needed {purpose}; install it with: {pip_install('data')}")
    return importlib.import_module(name)


READERS = {
    ".jsonl": _read_jsonl, ".json": _read_jsonl, ".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_table,
    ".arrow": _read_table,
}  # fmt: skip
