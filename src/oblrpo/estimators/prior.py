"""What other prompts and earlier steps say of a prompt's weights and baseline, and how much to rely on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators.advantages import advantages

STRENGTHS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1e6)
"""The strengths that an automatic choice is made from, in outputs of average weight."""


class Prior:
    """Mean weight w_bar and weighted baseline b_bar of prompts other than the one in question, for `oblr_shrunk`.

    They are w_bar = mean w and b_bar = sum w F / sum w over the outputs of the other prompts of this batch and of
    earlier steps, which count `memory` times less a step. Nothing of a prompt's own outputs enters, so that the
    gradient stays unbiased.

    The strength c is the number of outputs of average weight that the prior counts for. `strength=None` takes the c in
    `STRENGTHS` with the least sum_j w_j (F_j - b_j(c))^2 over the prompts of *earlier* steps, discounted alike. That
    is the estimated variance as far as it depends on c, but for covariances between outputs of a group. Until there are
    earlier steps, c is `FIRST`.

    Use: `baseline("oblr_shrunk", rewards_PG, norm2_PG=w, prior=prior)` for each micro-batch, `prior.observe(...)` after
    it, and `prior.next_step()` once the whole batch is done with.

    Args:
        strength: the strength c, at least 0; None chooses it.
        past_only: whether other prompts of this batch are left out, and only earlier steps count.
        memory: the share of a step's weight that is left one step later, in [0, 1); 0 relies on this batch alone and
            cannot choose a strength.

    Raises:
        ValueError: a setting out of range.
    """

    FIRST = 8.0

    def __init__(self, strength: float | None = None, memory: float = 0.8, past_only: bool = False) -> None:
        if strength is not None and not 0 <= strength < float("inf"):
            raise ValueError(f"the prior's strength must be a number of outputs, at least 0, got {strength}.")
        if not 0 <= memory < 1:
            raise ValueError(f"the prior's memory must lie in [0, 1), got {memory}.")
        self.strength, self.memory, self.past_only = strength, memory, past_only
        self._sums = torch.zeros(3, dtype=torch.float64, device="cpu")  # of 1, w, w F over outputs, discounted
        self._new_sums = torch.zeros_like(self._sums)  # of this step's, while they do not count
        self._risk_C = torch.zeros(len(STRENGTHS), dtype=torch.float64, device="cpu")  # of earlier steps
        self._new_risk_C = torch.zeros_like(self._risk_C)  # of this step's

    @property
    def current_strength(self) -> float:
        """The number c of outputs that the prior counts for: fixed, or of least discounted risk on earlier steps."""
        if self.strength is not None:
            return self.strength
        return STRENGTHS[int(self._risk_C.argmin())] if bool(self._risk_C.any()) else self.FIRST

    def of_others(self, rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor) -> tuple[Tensor, Tensor]:
        """The prior's w_bar and b_bar for every prompt, both (P, 1); 0 where there is no other output."""
        norm2_PG = norm2_PG * valid_PG
        own_P3 = torch.stack([valid_PG, norm2_PG, norm2_PG * rewards_PG], -1).sum(1)
        before_P3 = torch.cat([torch.zeros_like(own_P3[:1]), own_P3.cumsum(0)[:-1]])
        after_P3 = torch.cat([own_P3.flip(0).cumsum(0).flip(0)[1:], torch.zeros_like(own_P3[:1])])
        others_P3 = torch.zeros_like(own_P3) if self.past_only else before_P3 + after_P3
        count_P, weight_P, weighted_P = (others_P3 + self._sums.to(own_P3)).unbind(-1)
        mean_weight_P = torch.where(count_P > 0, weight_P / count_P, 0)
        return mean_weight_P[:, None], torch.where(weight_P > 0, weighted_P / weight_P, 0)[:, None]

    def observe(self, rewards_PG: Tensor, norm2_PG: Tensor, valid_PG: Tensor | None = None) -> None:
        """Take in a micro-batch whose baselines have been computed; off-policy its norm2_PG is rho^2 w."""
        valid_PG = torch.ones_like(rewards_PG, dtype=torch.float64) if valid_PG is None else valid_PG.double()
        rewards_PG = torch.where(valid_PG > 0, rewards_PG.detach().double(), 0)
        norm2_PG = torch.where(valid_PG > 0, norm2_PG.detach().double(), 0)
        for index, strength in enumerate(STRENGTHS):
            baseline_PG = shrunk(
                rewards_PG, valid_PG, norm2_PG, *self.of_others(rewards_PG, valid_PG, norm2_PG), strength
            )
            risk = (valid_PG * norm2_PG * advantages(rewards_PG, baseline_PG).square()).sum()
            self._new_risk_C[index] += risk.cpu()
        weight_PG = norm2_PG * valid_PG
        new = self._new_sums if self.past_only else self._sums
        new += torch.stack([valid_PG.sum(), weight_PG.sum(), (weight_PG * rewards_PG).sum()]).cpu()

    def next_step(self) -> None:
        """The batch is complete: count it among earlier steps."""
        self._sums = self.memory * (self._sums + self._new_sums)
        self._new_sums = torch.zeros_like(self._sums)
        self._risk_C = self.memory * (self._risk_C + self._new_risk_C)
        self._new_risk_C = torch.zeros_like(self._risk_C)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, between steps. The settings are the caller's to give again."""
        return {"sums": self._sums.clone(), "risk": self._risk_C.clone(), "new_risk": self._new_risk_C.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            ValueError: it was saved with other strengths to choose from.
        """
        if state["risk"].shape != self._risk_C.shape:
            raise ValueError(f"the prior was saved with {state['risk'].numel()} strengths, here are {len(STRENGTHS)}.")
        self._sums, self._risk_C = state["sums"].double().clone(), state["risk"].double().clone()
        self._new_risk_C = state["new_risk"].double().clone()


def shrunk(
    rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor, weight_P1: Tensor, baseline_P1: Tensor, strength: float
) -> Tensor:
    """Return (sum_{i != j} w_i F_i + c w_bar b_bar) / (sum_{i != j} w_i + c w_bar); equal weights where all are 0."""
    weights_PG = norm2_PG * valid_PG
    others_PG = sum_of_others(weights_PG) + strength * weight_P1
    weighted_PG = sum_of_others(weights_PG * rewards_PG) + strength * weight_P1 * baseline_P1
    return torch.where(others_PG > 0, weighted_PG / others_PG, mean_of_others(rewards_PG, valid_PG, baseline_P1))


def mean_of_others(rewards_PG: Tensor, valid_PG: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
    """The mean reward of the other valid outputs of the group, or `otherwise` where there is none."""
    count_PG = sum_of_others(valid_PG)
    mean_PG: Tensor = sum_of_others(valid_PG * rewards_PG) / count_PG.clamp(min=1)
    return torch.where(count_PG > 0, mean_PG, otherwise)


def sum_of_others(values_PG: Tensor) -> Tensor:
    """The sum of v_i over i != j, as what comes before and what comes after j: nothing is subtracted, in O(G)."""
    zero_P1 = torch.zeros_like(values_PG[:, :1])
    before_PG = torch.cat([zero_P1, values_PG.cumsum(1)[:, :-1]], 1)
    after_PG = torch.cat([values_PG.flip(1).cumsum(1).flip(1)[:, 1:], zero_P1], 1)
    return before_PG + after_PG
