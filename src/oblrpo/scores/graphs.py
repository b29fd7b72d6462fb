"""What an autograd graph shows of how it was made: for refusals that name the cause, and to be careful with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

REENTRANT = "reentrant activation checkpointing hides the layers from the tape; checkpoint with use_reentrant=False."


def nodes(output: Tensor, into_layers: bool) -> Iterator[Any]:
    """The nodes of the graph that made the output, the nearest first; down to the recorded layers, or into them."""
    waiting, seen = deque([output.grad_fn]), set[Any]()
    while waiting:
        node: Any = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        function = getattr(node, "_forward_cls", None)
        if into_layers or function is None or is_foreign(function):
            waiting.extend(following for following, _ in node.next_functions)


def is_foreign(function: type) -> bool:
    """Whether an autograd function written in Python is none of the score tape's."""
    return not function.__module__.startswith("oblrpo.scores.")


def foreign_functions(output: Tensor) -> Iterator[type]:
    """Autograd functions written in Python that the output was computed by, but for those of the score tape."""
    functions = (getattr(node, "_forward_cls", None) for node in nodes(output, into_layers=True))
    return (function for function in functions if function is not None and is_foreign(function))


def foreign_hooks() -> bool:
    """Whether what autograd saves now passes through hooks (offloading, say) other than those of torch itself."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")


def why_nothing_was_recorded(logps_S: Tensor, ran_without_gradients: bool) -> str:
    """What hid every layer of the model from the tape, as far as the graph shows."""
    functions = list(foreign_functions(logps_S))
    if any(function.__name__ == "CheckpointFunction" for function in functions):
        return REENTRANT
    if functions:
        names = ", ".join(sorted({function.__name__ for function in functions}))
        return f"the layers run inside an autograd function ({names}), which hides them from the tape."
    if ran_without_gradients:
        return (
            "the layers ran without gradients: under torch.no_grad(), or inside reentrant activation checkpointing "
            "(checkpoint with use_reentrant=False)."
        )
    return (
        "run the model inside the `with` block, with gradients enabled; it must be the model that the tape was given, "
        "and not its compiled twin (torch.compile)."
    )
