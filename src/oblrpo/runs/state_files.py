"""Trainer state on disk: tensors in safetensors, the rest in JSON; nothing is ever unpickled."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from oblrpo.errors import InputError

TENSORS, STATE = "oblrpo_state.tensors", "oblrpo_state.json"
"""The tensors are safetensors under another suffix: vLLM takes every *.safetensors of a folder for the model's."""

_TENSOR = "__tensor__"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a tree of dicts, lists, numbers, text and tensors."""
    tensors: dict[str, Tensor] = {}
    tree = _take_tensors(state, tensors)
    save_file(tensors, folder / TENSORS)
    (folder / STATE).write_text(json.dumps(tree), encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Return the tree that `save_state` wrote."""
    with _readable(folder):
        tensors = load_file(folder / TENSORS)
        return {key: _put_tensors(entry, tensors) for key, entry in _tree(folder)}


def origin(folder: Path) -> tuple[str, int]:
    """Return which run wrote a state, and after which step."""
    with _readable(folder):
        top = dict(_tree(folder))
        return str(top["run"]), int(top["step"])


def _tree(folder: Path) -> list[Any]:
    return list(json.loads((folder / STATE).read_text("utf-8"))["__dict__"])


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(
            f"the checkpoint {folder} cannot be read ({' '.join(str(error).split())[:200]}); "
            "remove that folder to resume from the one before it."
        ) from None


def _take_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree with its tensors moved out, and dicts as lists of pairs, because optimizer keys are integers."""
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
