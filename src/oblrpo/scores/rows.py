"""The check that rows do not mix: one more backward, of some entries, once for each way of running a model."""

from __future__ import annotations

from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oblrpo.scores.layout import Layout
from oblrpo.scores.recorder import ForwardRecorder, foreign_functions, nodes
from oblrpo.scores.rules import UnsupportedModelError, wrapped_by_fsdp

KEPT_APART: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""The ways (`way_of`) of a model in which its rows were seen to keep apart, whichever tape saw it: a new tape costs no
more."""

NEAR = 64
"""Functions next to the log-probabilities that are distinguished."""


def check_rows(recorder: ForwardRecorder, logps_S: Tensor, layout: Layout) -> None:
    """Run the backward of some entries of logps_S, which must leave every layer's other rows without a gradient.

    It is done once for each way of running the model (`way_of`), and again only where a function that may bring rows
    together by what they hold ran around parameters without a rule. It is left out for sharded models, where all ranks
    would have to, and where the graph holds functions or hooks of other libraries, which may not stand a second
    backward.

    Raises:
        UnsupportedModelError: other rows matter, or may, and cannot be looked at.
    """
    if len(logps_S) < 2:
        return
    recorder.operations.refuse_doubtful()
    may_mix, kept_apart = recorder.operations.may_mix, KEPT_APART.setdefault(recorder.model, set())
    sharded = any(map(wrapped_by_fsdp, recorder.model.modules()))
    way = 0 if sharded else way_of(recorder.model, logps_S, layout, recorder.given)  # those are never looked at
    if way in kept_apart and may_mix is None:
        return
    if recorder.foreign_hooks or sharded or next(foreign_functions(logps_S), None) is not None:
        if may_mix is None:
            return
        why = "parameters are sharded" if sharded else "functions or hooks of other libraries are in the graph"
        raise UnsupportedModelError(
            f"{may_mix} may bring rows of the batch together around parameters without a rule, which cannot be "
            f"looked at where {why}."
        )
    every = any(layer.by_operations for layer in recorder.layers.values())
    for chosen_S in rows_to_check(len(logps_S), logps_S.device, every):
        autocast = torch.autocast(logps_S.device.type, enabled=False)
        with recorder.collector.collecting(layout, chosen_S=chosen_S) as mixing, autocast:
            torch.autograd.grad(logps_S, recorder.root, chosen_S.to(logps_S), retain_graph=True, allow_unused=True)
        if mixing and bool(torch.stack([mixes for _, mixes in mixing]).any()):
            name = next(name for name, mixes in mixing if bool(mixes))  # the nearest to the log-probabilities
            raise UnsupportedModelError(
                f"{name}: entries of logps_S depend on other rows of this layer than their own; they are in another "
                "order than the rows, the layer runs time-first, or sequences mix."
            )
    kept_apart.add(way)


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


def rows_to_check(sequences: int, device: torch.device, every: bool = False) -> list[Tensor]:
    """About half of the rows, (S,), such that in another order they are hardly ever the same rows.

    With `every`, by each binary digit of the row's number those with 1 and those with 0 too, which separate any two.
    """
    golden, row_S = 0.6180339887, torch.arange(sequences, device=device)
    chosen = [(row_S.double() * golden) % 1 >= 0.5]
    for digit in range((sequences - 1).bit_length() if every else 0):
        ones_S = (row_S >> digit) & 1 == 1
        chosen += [ones_S, ~ones_S]
    return chosen
