"""Reading a JSON Lines file, with errors that name the line and the column."""

import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from oblrpo.errors import InputError, did_you_mean, nearby
from oblrpo.regular_files import regular

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DECODER = json.JSONDecoder()
OF_JSON = {str, int, float, bool, type(None)}
OFTEN_CALLED = {
    "prompt_column": ("prompt", "question", "problem", "instruction", "input", "query", "messages", "text"),
    "answer_column": ("answer", "solution", "target", "label", "output", "response", "ground_truth", "final_answer"),
}
MOST_DIGITS = 4_000  # of a number; longer ones take a while to print, and of integers Python prints 4,300


Item = TypeVar("Item")


class Lazy(Sequence[Item]):
    """What a function makes of the items of a sequence, each when it is taken: a million dicts take gigabytes."""

    def __init__(self, make: Callable[[Any], Item], of: Sequence[Any]) -> None:
        self._make, self._of = make, of
        self.known: Any = None
        """What is known of all items without making them."""

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Item]:
        return map(self._make, self._of)

    def __getitem__(self, place: Any) -> Any:
        return list(map(self._make, self._of[place])) if isinstance(place, slice) else self._make(self._of[place])


def read_objects(path: Path) -> Lazy[tuple[int, dict[str, Any]]]:
    """Return (line number, object) of every row; blank lines are skipped.

    The file may be packed with gzip. Its bytes are kept, because it may change while a run goes on.
    """
    try:
        with regular(path).open("rb") as file:
            data = file.read()
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, ValueError, EOFError, zlib.error) as error:  # ValueError: a null byte in the path
        raise unreadable(path, error) from error
    lines, begins, number, begin = array("q"), array("q"), 0, 0
    for block in BytesIO(data):
        # Bytes, because str.splitlines would also split at characters that JSON allows inside strings.
        for line in block.splitlines(keepends=True):
            number += 1
            if (rest := line.removeprefix(BYTE_ORDER_MARK)) and not rest.isspace():
                lines.append(number)
                begins.append(begin)
            begin += len(line)
    begins.append(begin)
    if not lines:
        raise InputError(f"{path} holds no rows; give a JSON Lines file with one object per line.")

    def row(index: int) -> tuple[int, dict[str, Any]]:
        return lines[index], _parse(data[begins[index] : begins[index + 1]], path, lines[index])

    return Lazy(row, range(len(lines)))


def unreadable(path: Path, error: Exception) -> InputError:
    """Return the error about a data file that cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return InputError(f"{path} is not UTF-8 text; save the file as UTF-8.")
    hint = " Give the files in it." if isinstance(error, IsADirectoryError) else ""
    hint += nearby(path) if isinstance(error, FileNotFoundError) else ""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return InputError(f"Cannot read the data file {path}: {reason}; check the path.{hint}")


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8").strip()
        row, end = _DECODER.raw_decode(text)  # without what json.loads does beside, which took longer
        if isinstance(row, dict) and end == len(text):
            return row
        row = json.loads(text)
        reason = f"is {kind_of(row)}, not an object; write one JSON object per line"
    except UnicodeDecodeError:
        reason = "is not UTF-8 text; save the file as UTF-8"
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        message = getattr(error, "msg", None) or "too deep or too large"
        reason = f"is not JSON ({message}); write one JSON object per line"
    raise InputError(f"{path} line {number} {reason}.")


def value_at(row: Mapping[str, Any], column: str, absent: Any = None) -> Any:
    """Return what a column holds, or for `column.key` what its mapping holds there; `absent` if there is neither."""
    if column in row:
        value = row[column]
        return value if type(value) in OF_JSON else native(value)
    outer, dot, inner = column.partition(".")
    nested = row.get(outer)
    return value_at(nested, inner, absent) if dot and isinstance(nested, Mapping) else absent


def native(value: Any) -> Any:
    """Return numpy's numbers, and those of its kin, as numbers, and arrays as lists, in lists and mappings too."""
    if type(value) in OF_JSON:
        return value
    if type(value) is not dict and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [native(item) for item in value]
    if isinstance(value, (dict, Mapping)):
        return {key: item if type(item) in OF_JSON else native(item) for key, item in value.items()}
    return value


def text_of(row: Mapping[str, Any], column: str, where: str, setting: str = "", taken: str = "") -> str:
    """Return a column, or a key of one (`value_at`), as text, a number without exponent.

    `setting` names the column, and `taken` one with another part, which is not suggested.
    """
    value = row.get(column)
    if type(value) is str and value and value.isascii() and not value.isspace():  # most of most data
        return value
    value = value_at(row, column, row)
    if value is row:
        inner = [f"{name}.{key}" for name, nested in row.items() if isinstance(nested, Mapping) for key in nested]
        present = ", ".join(f"'{name}'" for name in (*row, *inner)) or "none"
        hint = did_you_mean(column, [name for name in (*row, *inner) if name != taken])
        if setting:
            own = next((name for name in OFTEN_CALLED[setting] if name in row and name != taken), "NAME")
            hint += f" Name yours: --{setting.replace('_', '-')} {own} ({setting}={own!r} in Python)"
            hint += ", or choose rewards that need no answer." if setting == "answer_column" else "."
        raise InputError(f"{where} has no column '{column}'; its columns are: {present}.{hint}")
    text = plain(value)
    if text is None:
        raise InputError(
            f"{where}: column '{column}' holds {kind_of(value)}; it must be text or a finite number of at most "
            f"{MOST_DIGITS:,} digits."
        )
    if not text or text.isspace():
        raise InputError(f"{where}: column '{column}' is empty; fill it or remove the row.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: column '{column}' holds half a surrogate pair; fix or remove it.") from error
    return text


def plain(value: Any) -> str | None:
    """Return text as it is and a finite number without exponent; None for anything else."""
    value = native(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    if isinstance(value, int):
        return str(value) if value.bit_length() < 3.322 * MOST_DIGITS else None
    number = Decimal(str(value))
    return format(number, "f") if number.is_finite() and abs(number.adjusted()) < MOST_DIGITS else None


def as_text(value: Any) -> str:
    """Return anything as text for a person to read: what `plain` does, or else JSON."""
    if isinstance(value, str):
        return value
    try:
        return plain(value) or json.dumps(native(value), ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # ValueError: an integer of thousands of digits
        return f"{kind_of(value)} that cannot be shown"


def kind_of(value: Any) -> str:
    """Return what a value is, in words."""
    kinds = {list: "a JSON array", dict: "a JSON object", str: "a JSON string", bool: "a JSON boolean"}
    kinds |= {type(None): "a JSON null", int: "a JSON number", float: "a JSON number"}
    return kinds.get(type(value), f"a {type(value).__name__}")
