"""Rewards of a batch of completions, checked."""

from __future__ import annotations

import torch
from torch import Tensor

from oblrpo.errors import InputError
from oblrpo.tasks import Problem, Task


def rewards_of(task: Task, problems: list[Problem], completions: list[str]) -> Tensor:
    """F, shape (P, G) on the CPU: completion p G + j answers problem p.

    Raises:
        InputError: a reward is NaN or infinite.
    """
    G = len(completions) // len(problems)
    rewards_S = [task.reward(problems[s // G], text) for s, text in enumerate(completions)]
    rewards_PG = torch.tensor(rewards_S, dtype=torch.float32).view(-1, G)
    for s in (~rewards_PG.isfinite()).flatten().nonzero().flatten().tolist():
        raise InputError(
            f"the reward of the completion {completions[s][:40]!r} to the prompt {problems[s // G].prompt[:40]!r} is "
            f"{rewards_S[s]}; rewards must be finite."
        )
    return rewards_PG
