"""Assumption 1, checked: a baseline must not depend on the output that it is subtracted from. Your own baselines."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators.baselines import FUNCTIONS, baseline, baseline_inputs
from oblrpo.tables.baselines import BASELINES, Baseline

YOUR_OWN = "your own"


def depends_on_own_output(name: str, seed: int = 0, prompts: int = 3, outputs: int = 4, tokens: int = 5) -> bool:
    """Whether an output's own reward, norm or length moves its own baseline, tried on random groups.

    Two outputs with the same other outputs in their group (and in the batch) must get the same baseline. A baseline
    that says it is `unbiased` and fails this is not. Outputs have 1 to `tokens` tokens.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def inputs() -> dict[str, Any]:
        rewards_PG = torch.rand(prompts, outputs, generator=generator, dtype=torch.float64, device="cpu")
        return {"rewards_PG": rewards_PG} | random_inputs(prompts, outputs, tokens, generator)

    given, others = inputs(), inputs()
    before = baseline(name, **given)
    for p, j in itertools.product(range(prompts), range(outputs)):
        changed = {key: value.clone() for key, value in given.items()}
        for key, value in changed.items():
            value[p, j] = others[key][p, j]
        if not torch.allclose(baseline(name, **changed)[p, j], before[p, j], rtol=1e-9, atol=1e-12):  # rounding is less
            return True
    return False


def register_baseline(name: str, function: Callable[..., Tensor]) -> None:
    """Add a baseline of your own to `BASELINES`; whether it is unbiased is tried (`depends_on_own_output`).

    Args:
        name: what `baseline` shall know it by.
        function: of rewards_PG, valid_PG and, where it needs them, norm2_PG and length_PG, by these names, all (P, G)
            in float64, to b, (P, G).

    Raises:
        ValueError: a baseline of ours has the name, the function has other parameters, or it fails on random rewards.
    """
    if name in BASELINES and BASELINES[name].meaning != YOUR_OWN:
        raise ValueError(f"there is a baseline {name!r} already; choose another name.")
    takes = tuple(inspect.signature(function).parameters)
    if takes[:2] != ("rewards_PG", "valid_PG") or not {"norm2_PG", "length_PG"}.issuperset(takes[2:]):
        raise ValueError(
            f"baseline {name!r} takes ({', '.join(takes)}); its parameters must be rewards_PG, valid_PG and, where it "
            "needs them, norm2_PG and length_PG."
        )

    def checked(**given: Tensor) -> Tensor:
        b, shape = function(**given), given["rewards_PG"].shape
        if not isinstance(b, Tensor) or b.shape != shape or not b.isfinite().all():
            raise ValueError(f"baseline {name!r} must return finite numbers, a tensor of shape {tuple(shape)}.")
        return b

    FUNCTIONS[name], BASELINES[name] = checked, Baseline(YOUR_OWN, unbiased=False, needs=takes[2:])
    try:
        unbiased = not depends_on_own_output(name)
        ties_PG = torch.tensor([[1.0] * 3, [0.0] * 3], dtype=torch.float64, device="cpu")
        inputs: dict[str, Any] = {**random_inputs(2, 3, 4, torch.Generator("cpu"))}
        learns_from_ties = not torch.allclose(baseline(name, ties_PG, **inputs), ties_PG)
        BASELINES[name] = replace(BASELINES[name], unbiased=unbiased, learns_from_ties=learns_from_ties)
    except Exception as error:
        del FUNCTIONS[name], BASELINES[name]
        raise ValueError(f"baseline {name!r} fails on random rewards: {type(error).__name__}: {error}") from error


def random_inputs(prompts: int, outputs: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """All inputs of every baseline, drawn at random on the CPU in float64, with outputs of 1 to `tokens` tokens."""
    shape = (prompts, outputs)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64, device="cpu")

    lengths_PG = torch.randint(1, tokens + 1, shape, generator=generator, device="cpu")
    norm2_PG, logit_norm2_PGT = rand(*shape), rand(*shape, tokens)
    mask_PGT = (torch.arange(tokens, device="cpu") < lengths_PG[..., None]).double()
    return baseline_inputs(mask_PGT, norm2_PG, logit_norm2_PGT)
