"""Which prompts to draw: of data that are met again, those whose gradients were large, weighed so that the mean stays.

Of M prompts, P are drawn independently with chances p_q, and the gradient of one that is drawn counts
u_q = 1 / (M p_q) times. So the mean over draws is that over all prompts, grad J, whatever p depends on, as long as that
was known before the step; the P weighed gradients are independent of each other, so that signal and noise are
estimated without bias, too. Their noise is least at p_q proportional to sqrt(E ||g_q||^2), g_q being the gradient from
G outputs of prompt q. Derived for this project.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EVENLY = 0.25
"""The share of the draws that goes to all prompts alike, so that none counts more than 1 / EVENLY times."""
PRIOR = 1.0
"""How many visits of its own the mean over all prompts counts for in what is expected of one."""
MEMORY = 0.7
"""What a visit counts for one epoch later."""


class PromptPulls:
    """Expects of each prompt's squared gradient norm what its own visits say, shrunk to the mean over all prompts.

    Norms are taken over the mean of their step, because all of them change as the policy learns.

    Args:
        prompts: the number M of prompts.
    """

    def __init__(self, prompts: int) -> None:
        self._visits_M = torch.zeros(prompts, dtype=torch.float64, device="cpu")  # discounted
        self._norm2_M = torch.zeros_like(self._visits_M)  # sums over those visits, over their steps' means

    @property
    def chances_M(self) -> Tensor:
        """The chances p_q of the next draw; 1 / M each before anything is known."""
        pull_M = ((self._norm2_M + PRIOR) / (self._visits_M + PRIOR)).sqrt()
        return (1 - EVENLY) * pull_M / pull_M.sum() + EVENLY / len(pull_M)

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw prompts with replacement: their places (P,), and how many times the gradient of each counts, (P,)."""
        chance_M = self.chances_M
        index_P = torch.multinomial(chance_M, size, replacement=True, generator=generator)
        return index_P, 1 / (len(chance_M) * chance_M[index_P])

    def observe(self, index_P: Tensor, weight_P: Tensor, norm2_P: Tensor) -> None:
        """Take in a step: prompts that were drawn, their weights, and ||g_q||^2 of each, not weighed.

        A step in which no prompt has a gradient says nothing.
        """
        weight_P, norm2_P = (each.detach().cpu().double() for each in (weight_P, norm2_P))
        mean = float((weight_P * norm2_P).sum() / weight_P.sum())
        if mean <= 0:
            return
        kept = MEMORY ** (len(index_P) / len(self._visits_M))
        self._visits_M *= kept
        self._norm2_M *= kept
        self._visits_M.index_add_(0, index_P, torch.ones_like(norm2_P))
        self._norm2_M.index_add_(0, index_P, norm2_P / mean)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"visits": self._visits_M.clone(), "norm2": self._norm2_M.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            ValueError: it is the state of another number of prompts.
        """
        if state["visits"].shape != self._visits_M.shape:
            raise ValueError(f"the data had {len(state['visits'])} training problems, and now {len(self._visits_M)}")
        self._visits_M, self._norm2_M = state["visits"].double().clone(), state["norm2"].double().clone()
