"""Assumption 1, checked: a baseline must not depend on the output that it is subtracted from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators.baselines import baseline
from oblrpo.estimators.inputs import random_inputs


def depends_on_own_output(name: str, seed: int = 0, prompts: int = 3, outputs: int = 4, tokens: int = 5) -> bool:
    """Whether an output's own reward, norm or length moves its own baseline, tried on random groups.

    Two outputs with the same other outputs in their group (and in the batch) must get the same baseline. A baseline
    that says it is `unbiased` and fails this is not.

    Args:
        name: a key of `BASELINES`.
        seed: the seed of the random rewards and weights.
        prompts: the number P of prompts in a batch.
        outputs: the number G of outputs a prompt.
        tokens: the greatest length T of an output.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def inputs() -> dict[str, Tensor]:
        rewards_PG = torch.rand(prompts, outputs, generator=generator, dtype=torch.float64, device="cpu")
        return {"rewards_PG": rewards_PG} | random_inputs(prompts, outputs, tokens, generator)

    def of(values: dict[str, Any]) -> Tensor:
        return baseline(name, **values)

    given, others = inputs(), inputs()
    before = of(given)
    for p in range(prompts):
        for j in range(outputs):
            changed = {key: value.clone() for key, value in given.items()}
            for key, value in changed.items():
                value[p, j] = others[key][p, j]
            if not torch.equal(of(changed)[p, j], before[p, j]):
                return True
    return False
