"""Reading a JSON Lines file, with errors that name the line and the column."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from oblrpo.errors import InputError, did_you_mean


def read_objects(path: Path) -> list[tuple[int, dict[str, object]]]:
    """Return (line number, object) of every row; blank lines are passed over.

    Raises:
        InputError: the file cannot be read or holds no rows, or a row is not a JSON object.
    """
    rows = [(number, _parse(line, f"{path} line {number}")) for number, line in _lines(path)]
    if not rows:
        raise InputError(f"{path} holds no rows; give a JSON Lines file with one object per line.")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"Cannot read the data file {path}: {reason}; check the path.") from error
    # Bytes, because str.splitlines would also split at characters that JSON allows inside strings.
    lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1)
    return ((number, line) for number, line in lines if line.strip())


def _parse(line: bytes, where: str) -> dict[str, object]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text; save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        reason = getattr(error, "msg", None) or "too deep or too large"
        raise InputError(f"{where} is not JSON ({reason}); write one JSON object per line.") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} is a JSON {_kind(row)}, not an object; write one JSON object per line.")
    return row


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
    if not text.strip():
        raise InputError(f"{where}: column '{column}' is empty; fill it or remove the row.")
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
