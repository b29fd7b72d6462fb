"""The reference of a KL penalty: the policy as it was before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import check_finite
from oblrpo.estimators import kl_in_reward
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.sequences import MicroBatches


class Reference:
    """Takes F - beta log(pi(o|q) / pi_ref(o|q)) for the reward F, as a constant: the policy gradient of J - beta KL.

    The reference is a copy of the trained parameters, which take turns with it. Under adapters it is the adapters' copy
    only, and new adapters that begin at 0 make it the model with its adapters switched off. It is the policy as it is
    when `penalised` is first called; beta is the reward that a nat costs.
    """

    def __init__(self, policy: Policy, beta: float, temperature: float, micro_batches: MicroBatches) -> None:
        self.policy, self.beta, self.temperature, self.micro_batches = policy, beta, temperature, micro_batches
        self._weights: list[Tensor] = []

    @torch.no_grad()
    def penalised(self, sequences: Sequences, rewards_PG: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards less the penalty, and log(pi / pi_ref) of every completion in nats, both (P, G)."""
        if not self._weights:
            self._weights = [p.detach().clone() for p in self.policy.parameters]
        logps_PG = self._logps(sequences, rewards_PG)
        trained = [p.data for p in self.policy.parameters]
        try:  # the policy is the reference for a while
            for parameter, weight in zip(self.policy.parameters, self._weights, strict=True):
                parameter.data = weight
            reference_PG = self._logps(sequences, rewards_PG)
        finally:
            for parameter, weight in zip(self.policy.parameters, trained, strict=True):
                parameter.data = weight
        return kl_in_reward(rewards_PG, logps_PG, reference_PG, self.beta), logps_PG - reference_PG

    def _logps(self, sequences: Sequences, rewards_PG: Tensor) -> Tensor:
        logps_S = rewards_PG.new_zeros(rewards_PG.numel())
        for index_S in self.micro_batches.of(sequences, 1):  # no group needs to stay whole
            logps_S[index_S] = self.policy.logps(sequences.at(index_S), self.temperature).logps_S.to(logps_S)
        check_finite("log-probability", logps_S)
        return logps_S.view_as(rewards_PG)

    def state_dict(self) -> dict[str, Any]:
        """The weights; none before the first step, whose policy is the reference."""
        return {"weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        parameters = self.policy.parameters
        if state["weights"] and [w.shape for w in state["weights"]] != [p.shape for p in parameters]:
            raise ValueError("its reference for the KL penalty has other weights than the policy")
        self._weights = [w.to(p) for w, p in zip(state["weights"], parameters, strict=False)]
