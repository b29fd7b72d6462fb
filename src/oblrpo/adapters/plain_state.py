"""States as somebody else's checkpoint can hold them: JSON beside its own files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_json(state: dict[str, Any]) -> dict[str, Any]:
    """Replace the tensors of a state by lists of numbers."""
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in state.items()}


def from_json(state: dict[str, Any]) -> dict[str, Any]:
    """Replace the lists that `to_json` made by tensors, in float64."""
    return {
        key: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for key, value in state.items()
    }
