"""Reading a JSON Lines file, with errors that name the line and the column."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from oblrpo.errors import InputError, did_you_mean
from oblrpo.regular_files import regular

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every row, read as it is asked for; blank lines are passed over."""
    number, rows = 0, 0
    try:
        with regular(path).open("rb") as file:
            for block in file:
                # Bytes, because str.splitlines would also split at characters that JSON allows inside strings.
                for line in (block if number else block.removeprefix(BYTE_ORDER_MARK)).splitlines():
                    number += 1
                    if line and not line.isspace():
                        rows += 1
                        yield number, _parse(line, f"{path} line {number}")
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"Cannot read the data file {path}: {reason}; check the path.") from error
    if not rows:
        raise InputError(f"{path} holds no rows; give a JSON Lines file with one object per line.")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        if isinstance(row, dict):
            return row
        reason = f"is a JSON {_kind(row)}, not an object; write one JSON object per line"
    except UnicodeDecodeError:
        reason = "is not UTF-8 text; save the file as UTF-8"
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        message = getattr(error, "msg", None) or "too deep or too large"
        reason = f"is not JSON ({message}); write one JSON object per line"
    raise InputError(f"{where} {reason}.")


def text_of(row: dict[str, object], column: str, where: str) -> str:
    """Return a column as text, a number without exponent."""
    if column not in row:
        present = ", ".join(f"'{name}'" for name in row) or "none"
        raise InputError(f"{where} has no column '{column}'; its columns are: {present}.{did_you_mean(column, row)}")
    text = plain(row[column])
    if text is None:
        raise InputError(
            f"{where}: column '{column}' holds a JSON {_kind(row[column])}; it must be text or a finite number."
        )
    if not text or text.isspace():
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
