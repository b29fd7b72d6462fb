"""States as somebody else's checkpoint can hold them: JSON beside its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oblrpo.errors import InputError
from oblrpo.estimators import SNRSchedule


def without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state with lists of numbers in the place of tensors."""
    plain: dict[str, Any] = json.loads(json.dumps(state, default=torch.Tensor.tolist))
    return plain


def with_tensors(state: Any) -> Any:
    """The state with tensors in the place of lists, in float64."""
    if isinstance(state, dict):
        return {key: with_tensors(value) for key, value in state.items()}
    return torch.tensor(state, dtype=torch.float64) if isinstance(state, list) else state


def schedule_state(schedule: SNRSchedule) -> dict[str, Any]:
    """A schedule's state with its name."""
    return {"mode": schedule.mode, **schedule.state_dict()}


def load_schedule(schedule: SNRSchedule, state: dict[str, Any], file: Path, setting: str) -> None:
    """Let a schedule resume where `schedule_state` was taken; `setting` is how a user names it."""
    try:
        mode = state["mode"]
        if mode == schedule.mode:
            return schedule.load_state_dict(state)
    except KeyError as error:
        raise InputError(f"{file} was written by another version of oblrpo ({error} is missing).") from None
    raise InputError(f"{file} was written with {setting}={mode!r}; set it again, or start a new run.")
