"""RL of language models with the exact variance-optimal baseline (OBLR-PO) and a measured learning rate."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from oblrpo.api import Run, evaluate, train
    from oblrpo.diagnosis import diagnose
    from oblrpo.errors import InputError
    from oblrpo.estimators import BASELINES, SNRSchedule, baseline, ledger
    from oblrpo.scores import ScoreTape

_PLACES = {
    "Run": "oblrpo.api",
    "evaluate": "oblrpo.api",
    "train": "oblrpo.api",
    "diagnose": "oblrpo.diagnosis",
    "InputError": "oblrpo.errors",
    "BASELINES": "oblrpo.estimators",
    "SNRSchedule": "oblrpo.estimators",
    "baseline": "oblrpo.estimators",
    "ledger": "oblrpo.estimators",
    "ScoreTape": "oblrpo.scores",
}
"""Where each name comes from; it is imported when it is used, for torch takes seconds to load."""

__all__ = [
    "BASELINES",
    "InputError",
    "Run",
    "SNRSchedule",
    "ScoreTape",
    "__version__",
    "baseline",
    "diagnose",
    "evaluate",
    "ledger",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'oblrpo' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
