"""In which ways a model was run when its rows were seen to keep apart: known of the model, whichever tape looked.

The look itself is a backward of some log-probabilities (`ForwardRecorder.check_rows`). It is made once for each way of
running the model, so that a new tape in every step costs what one that is kept does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from oblrpo.scores.layout import Layout

KEPT_APART: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""The ways (`way_of`) of a model in which its rows were seen to keep apart."""

NEAR = 64
"""Functions next to the log-probabilities that are told apart."""


def way_of(model: nn.Module, logps_S: Tensor, layout: Layout, given: tuple[str, ...]) -> int:
    """A number for the way in which a model was run and its log-probabilities made.

    It changes with the modules and their modes, with what is trained, with the attention that is configured, with what
    the model was called with, with rows that are packed, as many as tokens or but two, which cannot tell of others, and
    with the functions that made log-probabilities of what the model's last recorded layers gave.
    """
    modules = [(id(module), type(module), module.training, "forward" in vars(module)) for module in model.modules()]
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    attention = [str(getattr(config, "_attn_implementation", None)) for config in configs.values()]
    trained = [(id(parameter), parameter.requires_grad) for parameter in model.parameters()]
    shape = (layout.packed, layout.sequences == layout.tokens, layout.sequences > 2)
    near = frozenset(_functions_near(logps_S))
    return hash((*modules, *attention, *trained, *given, shape, near))


def _functions_near(output: Tensor) -> Iterator[str]:
    """Names of the autograd functions between the output and the layers that are recorded, the nearest first."""
    waiting, seen = [output.grad_fn], set[Any]()
    while waiting and len(seen) < NEAR:
        node: Any = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield str(node.name())
        function = getattr(node, "_forward_cls", None)
        if function is None or not function.__module__.startswith("oblrpo.scores."):
            waiting += [following for following, _ in node.next_functions]
