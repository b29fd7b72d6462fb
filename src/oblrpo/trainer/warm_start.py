"""Supervised learning on demonstrations, to give a policy a skill that RL can then improve."""

import math
from collections.abc import Callable, Sequence

import torch

from oblrpo.errors import check_finite
from oblrpo.policy import Policy, Prompt, Sequences
from oblrpo.policy.micro_batches import MicroBatches

ALL = MicroBatches()


def warm_start(
    policy: Policy,
    demonstrations: Callable[[int], tuple[Sequence[Prompt], list[str]]],
    steps: int,
    learning_rate: float,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    micro_batches: MicroBatches = ALL,
) -> None:
    """Maximise the mean token log-probability of demonstrated completions with AdamW and a cosine rate.

    The loss is -sum log pi(o|q) / tokens over the completions of a batch, end tokens included; prompts have none. The
    rate rises over 20 steps, or over a tenth of them all where that is less.

    Args:
        policy: the policy, which is trained in place.
        demonstrations: a function from the step to prompts and completions.
        steps: the number of gradient steps.
        learning_rate: the peak of the learning rate.
        progress: a function that is called with each step and its loss, in nats a token.
        micro_batches: which demonstrations go through the model together; this changes memory and not the gradient.

    Raises:
        InputError: a demonstration is longer than the model's context.
        DivergedError: a loss is NaN or infinite.
    """
    optimizer = torch.optim.AdamW(policy.parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    rise = max(1, min(20, steps // 10))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = accumulate_loss(policy, policy.sequences(*demonstrations(step)), micro_batches)
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, loss)


def accumulate_loss(policy: Policy, batch: Sequences, micro_batches: MicroBatches = ALL) -> float:
    """Add the gradient of -sum log pi / tokens to `.grad`, a micro-batch at a time, and return the loss."""
    tokens, loss = batch.lengths_S.sum(), torch.zeros((), device="cpu")
    for rows_S in micro_batches.of(batch, 1):
        share = -policy.logps(batch.at(rows_S)).logps_S.sum() / tokens
        share.backward()
        loss += share.detach().to(loss)
    check_finite("loss of the supervised learning (learning_rate in warm_start_args)", loss)
    return loss.item()
