"""Supervised learning on demonstrations, to give a random policy a partial skill that RL can then improve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from oblrpo.policy.model import Policy
from oblrpo.policy.prompts import Prompt


def warm_start(
    policy: Policy,
    demonstrations: Callable[[int], tuple[Sequence[Prompt], list[str]]],
    steps: int,
    learning_rate: float,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Maximise the mean token log-probability of demonstrated completions with AdamW and a cosine rate.

    Args:
        policy: the policy, which is trained in place.
        demonstrations: a function from the step to prompts and completions.
        steps: the number of gradient steps.
        learning_rate: the peak of the learning rate.
        progress: a function that is called with each step and its loss, in nats a token.
    """
    optimizer = torch.optim.AdamW(policy.parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        batch = policy.sequences(*demonstrations(step))
        logps_S = policy.logps(batch).logps_S
        loss = -logps_S.sum() / batch.lengths_S.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, loss.item())
