"""In which ways a model was run when its rows were seen to keep apart, whichever tape looked.

The look itself is a backward of some log-probabilities (`ForwardRecorder.check_rows`). It is made once for each way of
running the model, so that a new tape in every step costs what one that is kept does.
"""

from __future__ import annotations

from itertools import islice
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from oblrpo.scores.graphs import nodes
from oblrpo.scores.layout import Layout

KEPT_APART: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""The ways (`way_of`) of a model in which its rows were seen to keep apart."""

NEAR = 64
"""Functions next to the log-probabilities that are told apart."""


def way_of(model: nn.Module, logps_S: Tensor, layout: Layout, given: tuple[str, ...]) -> int:
    """A number for the way in which a model was run and its log-probabilities made.

    It changes with the modules and their modes, what is trained, the attention that is configured, and the names of the
    arguments that were given. It changes with the shape: packed rows, as many rows as tokens, and two rows alone do not
    speak for others. And it changes with the functions between the last recorded layers and the log-probabilities.
    """
    modules = [(id(module), type(module), module.training, "forward" in vars(module)) for module in model.modules()]
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    attention = [str(getattr(config, "_attn_implementation", None)) for config in configs.values()]
    trained = [(id(parameter), parameter.requires_grad) for parameter in model.parameters()]
    shape = (layout.packed, layout.sequences == layout.tokens, layout.sequences > 2)
    near = frozenset(str(node.name()) for node in islice(nodes(logps_S, into_layers=False), NEAR))
    return hash((*modules, *attention, *trained, *given, shape, near))
