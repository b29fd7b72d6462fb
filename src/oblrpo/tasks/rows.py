"""Reading a JSON Lines file, with errors that name the line and the column."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, did_you_mean
from oblrpo.regular_files import regular

_SCAN: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every row, read as it is asked for; blank lines are passed over.

    Raises:
        InputError: the file cannot be read or holds no rows, or a row is not a JSON object.
    """
    number = 0
    for number, line in _lines(path):
        yield number, _parse(line, path, number)
    if not number:
        raise InputError(f"{path} holds no rows; give a JSON Lines file with one object per line.")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with regular(path).open("rb") as file:
            number, mark = 0, b"\xef\xbb\xbf"
            for block in file:
                # Bytes, because str.splitlines would also split at characters that JSON allows inside strings.
                for line in block.removeprefix(mark).splitlines():
                    number += 1
                    if not line.isspace() and line:
                        yield number, line
                mark = b""
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"Cannot read the data file {path}: {reason}; check the path.") from error


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = _value(line.decode("utf-8"))
        if isinstance(row, dict):
            return row
        reason = f"is a JSON {_kind(row)}, not an object; write one JSON object per line"
    except UnicodeDecodeError:
        reason = "is not UTF-8 text; save the file as UTF-8"
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        told = getattr(error, "msg", None) or "too deep or too large"
        reason = f"is not JSON ({told}); write one JSON object per line"
    raise InputError(f"{path} line {number} {reason}.")


def _value(text: str) -> Any:
    """Return what `json.loads` returns, in a third of its time for a short row: it looks for white space around."""
    with suppress(StopIteration):  # nothing begins at the first character, a blank
        value, end = _SCAN(text, 0)
        if end == len(text):
            return value
    return json.loads(text)


def text_of(row: dict[str, object], column: str, where: str) -> str:
    """Return a column as text, a number without exponent.

    Raises:
        InputError: the column is missing, empty, or neither text nor a finite number.
    """
    if column not in row:
        present = ", ".join(f"'{name}'" for name in row) or "none"
        raise InputError(
            f"{where} has no column '{column}'; its columns are: {present}.{did_you_mean(column, list(row))}"
        )
    text = plain(row[column])
    if text is None:
        raise InputError(
            f"{where}: column '{column}' holds a JSON {_kind(row[column])}; it must be text or a finite number."
        )
    if not text or text.isspace():
        raise InputError(f"{where}: column '{column}' is empty; fill it or remove the row.")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: column '{column}' holds half a surrogate pair; mend or remove it.") from error
    return text


def plain(value: object) -> str | None:
    """Return text as it is and a finite number without exponent; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value)), "f")
    return None


def _kind(value: object) -> str:
    kinds = {list: "array", dict: "object", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
