"""Trainer state on disk: tensors in safetensors, the rest in JSON; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from oblrpo.errors import InputError

TENSORS, STATE = "trainer_state.safetensors", "trainer_state.json"
_TENSOR = "__tensor__"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a tree of dicts, lists, numbers, text and tensors."""
    tensors: dict[str, Tensor] = {}
    tree = _take_tensors(state, tensors)
    save_file(tensors, folder / TENSORS)
    (folder / STATE).write_text(json.dumps(tree), encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` wrote.

    Raises:
        InputError: a file is missing, truncated or not what it should be.
    """
    try:
        tensors = load_file(folder / TENSORS)
        tree = json.loads((folder / STATE).read_text("utf-8"))
        return {key: _put_tensors(entry, tensors) for key, entry in tree["__dict__"]}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(
            f"the checkpoint {folder} cannot be read ({' '.join(str(error).split())[:200]}); "
            "remove that folder to resume from the one before it."
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader or a crash sees the old or the new, never a part.

    Raises:
        InputError: something that is no regular file is there (a device, a pipe, a folder), which must not be replaced.
    """
    if os.path.lexists(path) and not path.is_file():
        raise InputError(f"{path} is there and is no regular file; give another.")
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def check_writable(path: Path) -> None:
    """Find out before the work whether `write_atomically` will be able to write there; leaves nothing behind.

    Raises:
        InputError: it will not.
    """
    try:
        if os.path.lexists(path) and not path.is_file():
            raise InputError(f"{path} is there and is no regular file; give another.")
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
        partial.unlink()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL, or none
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"cannot write to {str(path)[:200]!r} ({reason}); give a file in a folder that is there."
        ) from None


def sync_folder(folder: Path) -> None:
    """Put the folder's files on the disk before it is renamed into place."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Put one file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree with tensors moved out, and dicts as lists of pairs because optimizer keys are integers.

    Raises:
        InputError: a value is of another kind.
    """
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: key}
    if isinstance(value, dict):
        return {"__dict__": [[key, _take_tensors(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_take_tensors(entry, tensors) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"this optimizer keeps a {type(value).__name__} in its state, which checkpoints cannot hold.")


def _put_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: _put_tensors(entry, tensors) for key, entry in value["__dict__"]}
    if isinstance(value, list):
        return [_put_tensors(entry, tensors) for entry in value]
    return value
