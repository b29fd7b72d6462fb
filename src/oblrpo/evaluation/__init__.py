"""Accuracy on held-out problems and on benchmarks; completions of one problem count as dependent."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oblrpo.evaluation.heldout import Accuracy, heldout_accuracy

__all__ = ["Accuracy", "heldout_accuracy"]


def __getattr__(name: str) -> Any:
    # Grading a file of completions needs no torch, which takes seconds to load.
    if name in __all__:
        from oblrpo.evaluation import heldout

        return getattr(heldout, name)
    raise AttributeError(name)
